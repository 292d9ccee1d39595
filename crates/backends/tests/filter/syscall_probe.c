// Makes one system call, or a fixed sequence, and prints the result: 0 or the errno.
#define _GNU_SOURCE
#include <errno.h>
#include <fcntl.h>
#include <pthread.h>
#include <stdio.h>
#include <stdlib.h>
#include <string.h>
#include <sys/mman.h>
#include <sys/socket.h>
#include <sys/syscall.h>
#include <sys/wait.h>
#include <unistd.h>

static int report(long result) {
    printf("%d\n", result < 0 ? errno : 0);
    return 0;
}

// Makes a call by number, with up to six arguments.
static int call(int count, char **args) {
    long a[7] = {0};
    for (int i = 0; i < count && i < 7; i++) a[i] = strtol(args[i], NULL, 0);
    long result = syscall(a[0], a[1], a[2], a[3], a[4], a[5], a[6]);
    // The child of clone(2) must not report.
    if (result == 0 && a[0] == SYS_clone) _exit(0);
    return report(result);
}

static void *idle(void *nothing) { return nothing; }

// Uses what ordinary programs use: threads, processes, memfds, file locks, a socket pair.
static int ordinary(void) {
    pthread_t thread;
    int status, pair[2];
    if (pthread_create(&thread, NULL, idle, NULL) || pthread_join(thread, NULL)) return report(-1);
    pid_t child = fork();
    if (child == 0) _exit(7);
    if (child < 0 || waitpid(child, &status, 0) != child || WEXITSTATUS(status) != 7) return report(-1);
    int memory = memfd_create("memory", MFD_CLOEXEC);
    if (memory < 0 || write(memory, "text", 4) != 4) return report(-1);
    int file = open("lock", O_CREAT | O_RDWR, 0600);
    struct flock lock = {.l_type = F_WRLCK, .l_whence = SEEK_SET};
    if (file < 0 || fcntl(file, F_SETLK, &lock)) return report(-1);
    return report(socketpair(AF_UNIX, SOCK_STREAM, 0, pair));
}

static int thread_only(void) {
    pthread_t thread;
    errno = pthread_create(&thread, NULL, idle, NULL);
    return report(errno ? -1 : 0);
}

#ifdef __x86_64__
// Calls getpid through the 32-bit entry point.
static int ia32(void) {
    long result;
    __asm__ volatile("int $0x80" : "=a"(result) : "a"(20) : "memory", "r8", "r9", "r10", "r11");
    printf("passed\n");
    return 0;
}
#endif

// Executes a copy of a program in a memfd.
static int execute_memfd(char *program) {
    int memory = memfd_create("program", MFD_CLOEXEC);
    if (memory < 0) return report(-1);
    int file = open(program, O_RDONLY);
    char bytes[65536];
    for (long count; (count = read(file, bytes, sizeof bytes)) > 0;)
        if (write(memory, bytes, count) != count) return report(-1);
    char *argv[] = {program, NULL}, *env[] = {NULL};
    fflush(stdout);
    return report(fexecve(memory, argv, env));
}

int main(int argc, char **argv) {
    if (!strcmp(argv[1], "call")) return call(argc - 2, argv + 2);
    if (!strcmp(argv[1], "ordinary")) return ordinary();
    if (!strcmp(argv[1], "thread")) return thread_only();
    if (!strcmp(argv[1], "execute")) return report(execv(argv[2], argv + 2));
    if (!strcmp(argv[1], "memfd")) return execute_memfd(argv[2]);
#ifdef __x86_64__
    if (!strcmp(argv[1], "ia32")) return ia32();
#endif
    return 99;
}
