/* Preloaded: fsync and fdatasync that take longer, as on a slow disk. $SLOW_FDATASYNC says by how many
   microseconds, or slow_fdatasync(). */
#define _GNU_SOURCE
#include <dlfcn.h>
#include <stdlib.h>
#include <unistd.h>

static volatile long delay;

__attribute__((constructor)) static void read_environment(void)
{
    const char *given = getenv("SLOW_FDATASYNC");
    delay = given ? atol(given) : 0;
}

void slow_fdatasync(long microseconds) { delay = microseconds; }

static int flush(const char *name, int fd)
{
    int (*real)(int) = (int (*)(int)) dlsym(RTLD_NEXT, name);
    if (delay)
        usleep(delay);
    return real(fd);
}

int fsync(int fd) { return flush("fsync", fd); }
int fdatasync(int fd) { return flush("fdatasync", fd); }
