"""One adapter per database, over one session per connection."""
