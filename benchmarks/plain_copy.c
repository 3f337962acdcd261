/* The limit that benchmarks/fetch.py compares with: what this machine does when nothing is checked.
 *
 *   plain_copy copy HOST PORT CONNECTIONS RANGE_BYTES < jobs    lines "<path with query> <size> <output file>"
 *   plain_copy disk FILE BYTES                                  writes, then fsyncs
 *
 * Prints the seconds that it took. Exits with 1 on any error.
 */
#define _GNU_SOURCE
#include <arpa/inet.h>
#include <errno.h>
#include <fcntl.h>
#include <netinet/tcp.h>
#include <pthread.h>
#include <stdio.h>
#include <stdlib.h>
#include <string.h>
#include <time.h>
#include <unistd.h>

enum { PIECE_BYTES = 256 << 10, MOST_JOBS = 1 << 16, PATH_BYTES = 4096 };

struct range {
    const char *path;
    int file;
    long long offset, length;
};

static struct range ranges[MOST_JOBS];
static int range_count, next_range;
static struct sockaddr_in server;
static char host[128];
static pthread_mutex_t lock = PTHREAD_MUTEX_INITIALIZER;

static void fail(const char *what) {
    fprintf(stderr, "plain_copy: %s: %s\n", what, strerror(errno));
    exit(1);
}

static double now(void) {
    struct timespec time;
    clock_gettime(CLOCK_MONOTONIC, &time);
    return time.tv_sec + time.tv_nsec / 1e9;
}

static void write_all(int file, const char *data, long long length, long long offset) {
    while (length) {
        ssize_t count = pwrite(file, data, length, offset);
        if (count < 0) fail("write");
        data += count, offset += count, length -= count;
    }
}

static void get(int connection, const struct range *range, char *buffer) {
    int length = snprintf(buffer, PIECE_BYTES, "GET %s HTTP/1.1\r\nHost: %s\r\nRange: bytes=%lld-%lld\r\n\r\n",
                          range->path, host, range->offset, range->offset + range->length - 1);
    if (write(connection, buffer, length) != length) fail("request");
    long long filled = 0, offset = range->offset, missing = range->length;
    char *body;
    do { /* the head of the answer, with whatever of the body comes along */
        ssize_t count = read(connection, buffer + filled, PIECE_BYTES - 1 - filled);
        if (count <= 0) fail("answer");
        buffer[filled += count] = 0;
    } while (!(body = strstr(buffer, "\r\n\r\n")));
    if (strncmp(buffer, "HTTP/1.1 206", 12)) {
        fprintf(stderr, "plain_copy: %.300s\n", buffer);
        exit(1);
    }
    body += 4;
    long long count = buffer + filled - body;
    while (1) {
        write_all(range->file, body, count, offset);
        offset += count, missing -= count;
        if (!missing) return;
        count = read(connection, buffer, missing < PIECE_BYTES ? missing : PIECE_BYTES);
        if (count <= 0) fail("body");
        body = buffer;
    }
}

static void *work(void *unused) {
    char *buffer = malloc(PIECE_BYTES);
    int connection = socket(AF_INET, SOCK_STREAM, 0), yes = 1;
    setsockopt(connection, IPPROTO_TCP, TCP_NODELAY, &yes, sizeof yes);
    if (connect(connection, (struct sockaddr *)&server, sizeof server)) fail("connect");
    while (1) {
        pthread_mutex_lock(&lock);
        int mine = next_range < range_count ? next_range++ : -1;
        pthread_mutex_unlock(&lock);
        if (mine < 0) return unused;
        get(connection, &ranges[mine], buffer);
    }
}

static void copy(char **arguments) {
    int connections = atoi(arguments[2]);
    long long range_bytes = atoll(arguments[3]), size;
    char path[PATH_BYTES], output[PATH_BYTES];
    pthread_t threads[64];
    if (connections < 1 || connections > 64 || range_bytes < 1) fail("arguments");
    server.sin_family = AF_INET;
    server.sin_port = htons(atoi(arguments[1]));
    if (inet_pton(AF_INET, arguments[0], &server.sin_addr) != 1) fail("address");
    snprintf(host, sizeof host, "%s:%s", arguments[0], arguments[1]);
    while (scanf("%4095s %lld %4095s", path, &size, output) == 3) {
        int file = open(output, O_RDWR | O_CREAT | O_TRUNC, 0600);
        if (file < 0 || posix_fallocate(file, 0, size)) fail(output);
        const char *kept = strdup(path);
        for (long long offset = 0; offset < size; offset += range_bytes) {
            if (range_count == MOST_JOBS) fail("too many ranges");
            long long rest = size - offset;
            ranges[range_count++] = (struct range){kept, file, offset, rest < range_bytes ? rest : range_bytes};
        }
    }
    for (int i = 0; i < connections; i++)
        if (pthread_create(&threads[i], NULL, work, NULL)) fail("thread");
    for (int i = 0; i < connections; i++) pthread_join(threads[i], NULL);
}

static void fill_disk(char **arguments) {
    int file = open(arguments[0], O_RDWR | O_CREAT | O_TRUNC, 0600);
    long long size = atoll(arguments[1]);
    char *buffer = malloc(PIECE_BYTES);
    memset(buffer, 0x5a, PIECE_BYTES);
    if (file < 0 || posix_fallocate(file, 0, size)) fail(arguments[0]);
    for (long long offset = 0; offset < size; offset += PIECE_BYTES)
        write_all(file, buffer, size - offset < PIECE_BYTES ? size - offset : PIECE_BYTES, offset);
    if (fsync(file)) fail("fsync");
}

int main(int count, char **arguments) {
    double began = now();
    if (count == 6 && !strcmp(arguments[1], "copy"))
        copy(arguments + 2);
    else if (count == 4 && !strcmp(arguments[1], "disk"))
        fill_disk(arguments + 2);
    else
        return 2;
    printf("%.6f\n", now() - began);
    return 0;
}
