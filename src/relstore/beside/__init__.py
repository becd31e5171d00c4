"""`%import relstore.beside`: relstore's sections in a file that imports RelStorage, too.

    %import relstorage
    %import relstore.beside
    <zodb_db main>
      mount-point /
      <relstore>
        <relstore-postgresql>
          dsn dbname=zodb
        </relstore-postgresql>
      </relstore>
    </zodb_db>

Of two packages that define a section of one name ZConfig takes none, and `%import relstore` defines RelStorage's.
"""
