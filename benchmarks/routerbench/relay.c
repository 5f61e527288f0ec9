/* What any proxy in user space must pay the kernel: bytes from one socket to the other, and nothing else.
 *
 * relay PORT UPSTREAM_PORT...  on 127.0.0.1; one upstream connection for each client, upstreams in turn. Sends
 * block, which is right only here, where both ends always read. */
#define _GNU_SOURCE
#include <arpa/inet.h>
#include <errno.h>
#include <netinet/tcp.h>
#include <stdio.h>
#include <stdlib.h>
#include <sys/epoll.h>
#include <sys/socket.h>
#include <unistd.h>

enum { MAX_FDS = 1 << 16, MAX_EVENTS = 256 };

static int peer_of[MAX_FDS]; /* 0: not open */
static char buffer[1 << 18];

static int tcp_socket(void) {
    return socket(AF_INET, SOCK_STREAM | SOCK_CLOEXEC, 0);
}

static struct sockaddr_in local(const char *port) {
    struct sockaddr_in address = {.sin_family = AF_INET};
    address.sin_addr.s_addr = htonl(INADDR_LOOPBACK);
    address.sin_port = htons((unsigned short)atoi(port));
    return address;
}

static void follow(int poll_fd, int fd) {
    struct epoll_event event = {.events = EPOLLIN, .data.fd = fd};
    epoll_ctl(poll_fd, EPOLL_CTL_ADD, fd, &event);
}

static void join(int poll_fd, int client, const char *upstream_port) {
    struct sockaddr_in address = local(upstream_port);
    int upstream = tcp_socket(), on = 1;
    if (client < 0 || upstream < 0 || client >= MAX_FDS || upstream >= MAX_FDS ||
        connect(upstream, (struct sockaddr *)&address, sizeof address)) {
        close(client);
        close(upstream);
        return;
    }
    setsockopt(client, IPPROTO_TCP, TCP_NODELAY, &on, sizeof on);
    setsockopt(upstream, IPPROTO_TCP, TCP_NODELAY, &on, sizeof on);
    peer_of[client] = upstream;
    peer_of[upstream] = client;
    follow(poll_fd, client);
    follow(poll_fd, upstream);
}

static void move(int from) {
    int to = peer_of[from];
    if (!to) return; /* closed by an event before this one */
    ssize_t size = recv(from, buffer, sizeof buffer, MSG_DONTWAIT);
    if (size < 0) {
        if (errno == EAGAIN || errno == EINTR) return; /* an event of the file descriptor's former life */
        size = 0;
    }
    for (ssize_t sent = 0; sent < size;) {
        ssize_t count = send(to, buffer + sent, (size_t)(size - sent), MSG_NOSIGNAL);
        if (count < 0) size = 0; /* it has gone */
        sent += count < 0 ? 0 : count;
    }
    if (size == 0) {
        peer_of[from] = peer_of[to] = 0;
        close(from);
        close(to);
    }
}

int main(int num_arguments, char **arguments) {
    if (num_arguments < 3) {
        fprintf(stderr, "usage: relay PORT UPSTREAM_PORT...\n");
        return 2;
    }
    struct sockaddr_in address = local(arguments[1]);
    struct epoll_event events[MAX_EVENTS];
    int on = 1, turn = 0, listener = tcp_socket(), poll_fd = epoll_create1(EPOLL_CLOEXEC);
    setsockopt(listener, SOL_SOCKET, SO_REUSEADDR, &on, sizeof on);
    if (bind(listener, (struct sockaddr *)&address, sizeof address) || listen(listener, 1024)) {
        perror("relay: cannot listen");
        return 1;
    }
    follow(poll_fd, listener);
    for (;;) {
        int count = epoll_wait(poll_fd, events, MAX_EVENTS, -1);
        for (int i = 0; i < count; i++) {
            if (events[i].data.fd != listener)
                move(events[i].data.fd);
            else
                join(poll_fd, accept(listener, NULL, NULL), arguments[2 + turn++ % (num_arguments - 2)]);
        }
    }
}
