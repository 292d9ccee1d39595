// Makes one system call, or something of the kind, and says what became of it: 0 or the errno.
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

static int said(long answer) {
    printf("%d\n", answer < 0 ? errno : 0);
    return 0;
}

// A call by its number, with up to six arguments.
static int call(int count, char **words) {
    long a[7] = {0};
    for (int i = 0; i < count && i < 7; i++) a[i] = strtol(words[i], NULL, 0);
    long answer = syscall(a[0], a[1], a[2], a[3], a[4], a[5], a[6]);
    // A child of clone(2) has nothing to say.
    if (answer == 0 && a[0] == SYS_clone) _exit(0);
    return said(answer);
}

static void *idle(void *nothing) { return nothing; }

// Threads, processes, files in memory, file locks, a pair of sockets: what ordinary programs do.
static int ordinary(void) {
    pthread_t thread;
    int status, pair[2];
    if (pthread_create(&thread, NULL, idle, NULL) || pthread_join(thread, NULL)) return said(-1);
    pid_t child = fork();
    if (child == 0) _exit(7);
    if (child < 0 || waitpid(child, &status, 0) != child || WEXITSTATUS(status) != 7) return said(-1);
    int memory = memfd_create("memory", MFD_CLOEXEC);
    if (memory < 0 || write(memory, "text", 4) != 4) return said(-1);
    int file = open("lock", O_CREAT | O_RDWR, 0600);
    struct flock lock = {.l_type = F_WRLCK, .l_whence = SEEK_SET};
    if (file < 0 || fcntl(file, F_SETLK, &lock)) return said(-1);
    return said(socketpair(AF_UNIX, SOCK_STREAM, 0, pair));
}

static int thread_only(void) {
    pthread_t thread;
    errno = pthread_create(&thread, NULL, idle, NULL);
    return said(errno ? -1 : 0);
}

#ifdef __x86_64__
// getpid by the table of 32-bit programs.
static int ia32(void) {
    long answer;
    __asm__ volatile("int $0x80" : "=a"(answer) : "a"(20) : "memory", "r8", "r9", "r10", "r11");
    printf("passed\n");
    return 0;
}
#endif

// Executes a program from a file without a name.
static int execute_nameless(char *program) {
    int memory = memfd_create("program", MFD_CLOEXEC);
    if (memory < 0) return said(-1);
    int file = open(program, O_RDONLY);
    char bytes[65536];
    for (long count; (count = read(file, bytes, sizeof bytes)) > 0;)
        if (write(memory, bytes, count) != count) return said(-1);
    char *argv[] = {program, NULL}, *env[] = {NULL};
    fflush(stdout);
    return said(fexecve(memory, argv, env));
}

int main(int argc, char **argv) {
    if (!strcmp(argv[1], "call")) return call(argc - 2, argv + 2);
    if (!strcmp(argv[1], "ordinary")) return ordinary();
    if (!strcmp(argv[1], "thread")) return thread_only();
    if (!strcmp(argv[1], "execute")) return said(execv(argv[2], argv + 2));
    if (!strcmp(argv[1], "nameless")) return execute_nameless(argv[2]);
#ifdef __x86_64__
    if (!strcmp(argv[1], "ia32")) return ia32();
#endif
    return 99;
}
