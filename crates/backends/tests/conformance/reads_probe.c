// Opens files in ways that race with a check of their names. Prints what it read.
#define _GNU_SOURCE
#include <errno.h>
#include <fcntl.h>
#include <pthread.h>
#include <sched.h>
#include <stdio.h>
#include <stdlib.h>
#include <string.h>
#include <sys/mman.h>
#include <sys/stat.h>
#include <sys/syscall.h>
#include <time.h>
#include <unistd.h>

static char name[4096];
static const char *one, *other;
static volatile int done;
// Whether the second thread has changed what the first one opens.
static volatile int changed;

// Prints the first line of each content once.
static int seen[256];
static void show(int fd) {
    char text[64];
    if (fd < 0) return;
    ssize_t n = read(fd, text, sizeof text);
    if (n > 0 && !seen[(unsigned char)text[0]]++) write(1, text, n);
    close(fd);
}

// Rewrites the name that the main thread passes to the kernel.
static void *rewrite(void *unused) {
    while (!done) {
        memcpy(name, other, strlen(other) + 1);
        memcpy(name, one, strlen(one) + 1);
        changed = 1;
    }
    return unused;
}

// Lets a link lead to one file and to the other in turn.
static void *relink(void *unused) {
    while (!done) {
        const char *targets[] = {other, one};
        for (int i = 0; i < 2; i++) {
            unlink("new");
            symlink(targets[i], "new");
            rename("new", "link");
        }
        changed = 1;
    }
    return unused;
}

// Moves the working directory, which threads share.
static void *move(void *unused) {
    while (!done) {
        chdir(other);
        chdir(one);
        changed = 1;
    }
    return unused;
}

// Replaces the descriptor that a name is relative to.
static int directory;
static void *replace(void *unused) {
    int a = open(one, O_PATH | O_DIRECTORY), b = open(other, O_PATH | O_DIRECTORY);
    while (!done) {
        dup2(b, directory);
        dup2(a, directory);
        changed = 1;
    }
    return unused;
}

static int race(void *(*second)(void *), int count) {
    pthread_t thread;
    strcpy(name, one);
    symlink(one, "link");
    directory = open(one, O_PATH | O_DIRECTORY);
    pthread_create(&thread, NULL, second, NULL);
    while (!changed) sched_yield();
    for (int i = 0; i < count && !seen['t']; i++) {
        if (second == rewrite) show(open(name, O_RDONLY));
        else if (second == relink) show(open("/workspace/link", O_RDONLY));
        else if (second == move) show(open("file", O_RDONLY));
        else show(openat(directory, "file", O_RDONLY));
    }
    done = 1;
    pthread_join(thread, NULL);
    return 0;
}

// Executes itself from a file without a name, as `read`.
static int from_memory(char **argv, const char *path) {
    int source = open(argv[0], O_RDONLY), target = memfd_create("probe", 0);
    char bytes[65536];
    for (ssize_t n; (n = read(source, bytes, sizeof bytes)) > 0;) write(target, bytes, n);
    char *arguments[] = {argv[0], "read", (char *)path, NULL}, *environment[] = {NULL};
    syscall(SYS_execveat, target, "", arguments, environment, AT_EMPTY_PATH);
    perror("execveat");
    return 1;
}

// Opens without the right to read, then again through /proc.
static int again(const char *path) {
    char link[64];
    int fd = open(path, O_PATH);
    sprintf(link, "/proc/self/fd/%d", fd);
    show(open(link, O_RDONLY));
    sprintf(link, "/dev/fd/%d", fd);
    show(open(link, O_RDONLY));
    show(openat(fd, "", O_RDONLY));
    return 0;
}

static int many(const char *path, int count) {
    struct timespec begin, end;
    clock_gettime(CLOCK_MONOTONIC, &begin);
    for (int i = 0; i < count; i++) {
        int fd = open(path, O_RDONLY);
        if (fd < 0) return 1;
        close(fd);
    }
    clock_gettime(CLOCK_MONOTONIC, &end);
    printf("%ld\n", ((end.tv_sec - begin.tv_sec) * 1000000000L + end.tv_nsec - begin.tv_nsec) / count);
    return 0;
}

int main(int argc, char **argv) {
    const char *what = argc > 2 ? argv[1] : "";
    one = argv[2];
    other = argc > 3 ? argv[3] : "";
    // Until it reads the other file, or this often.
    int count = argc > 4 ? atoi(argv[4]) : 0;
    if (!strcmp(what, "rewrite")) return race(rewrite, count);
    if (!strcmp(what, "relink")) return race(relink, count);
    if (!strcmp(what, "move")) return race(move, count);
    if (!strcmp(what, "replace")) return race(replace, count);
    if (!strcmp(what, "memory")) return from_memory(argv, argv[2]);
    if (!strcmp(what, "again")) return again(argv[2]);
    if (!strcmp(what, "many")) return many(argv[2], atoi(argv[3]));
    if (!strcmp(what, "read")) {
        int fd = open(argv[2], O_RDONLY);
        if (fd < 0) printf("errno %d\n", errno);
        show(fd);
        return 0;
    }
    return 2;
}
