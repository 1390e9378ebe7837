/* A slow network between network namespaces: a switch in user space over TAP devices, for kernels without netem.
 *
 *     switch RATE DELAY FLOW QUEUE NAMESPACE...
 *
 * RATE   Mbit/s of every host's link, in each direction; 0: unlimited
 * DELAY  microseconds from host to host
 * FLOW   Mbit/s of every TCP connection, as clouds cap single flows; 0: unlimited
 * QUEUE  KiB that may wait for a link, and for a connection's turn; what comes beyond is dropped
 *
 * Host i gets the device `bench0` with the address 02:00:00:00:00:i. A line "ready" on stdout says that all are there.
 * A packet leaves its host's link when that has sent all before it, then waits for its connection's turn and the delay,
 * then for the link of its destination. Segments stay as large as the kernel gives them (TSO), which saves the
 * processor; they count on the wire as the packets they would be cut into.
 */
#define _GNU_SOURCE
#include <errno.h>
#include <fcntl.h>
#include <linux/if_tun.h>
#include <linux/virtio_net.h>
#include <net/if.h>
#include <net/if_arp.h>
#include <poll.h>
#include <sched.h>
#include <stdint.h>
#include <stdio.h>
#include <stdlib.h>
#include <string.h>
#include <sys/ioctl.h>
#include <sys/socket.h>
#include <time.h>
#include <unistd.h>

enum { MAX_HOSTS = 64, MAX_FRAME = 70000, HEADER = sizeof(struct virtio_net_hdr), FLOWS = 1 << 16, BATCH = 32 };
enum { SEGMENT = 1448, OVERHEAD = 90 }; /* bytes of a full segment, and around it on the wire (TCP to Ethernet gap) */

typedef int64_t nanoseconds;

struct packet {
    nanoseconds due;
    uint64_t number; /* keeps packets of the same time in order */
    int to, arrived; /* host; whether it has passed the wire and now waits for the link of its destination */
    int length;
    unsigned char data[];
};

struct link {
    int device;
    nanoseconds up_free, down_free; /* when the link will have sent what it was given */
};

static struct link hosts[MAX_HOSTS];
static int num_hosts;
static double link_cost, flow_cost; /* nanoseconds per byte */
static nanoseconds delay;
static double queue; /* bytes */
static nanoseconds flow_free[FLOWS];
static struct packet **heap; /* by time; a binary heap */
static int waiting, room;
static uint64_t numbers;

static void fail(const char *what) {
    perror(what);
    exit(1);
}

static nanoseconds now(void) {
    struct timespec t;
    clock_gettime(CLOCK_MONOTONIC, &t);
    return (nanoseconds)t.tv_sec * 1000000000 + t.tv_nsec;
}

static int before(const struct packet *a, const struct packet *b) {
    return a->due != b->due ? a->due < b->due : a->number < b->number;
}

static void push(struct packet *packet) {
    if (waiting == room && !(heap = realloc(heap, (room = room ? 2 * room : 1024) * sizeof *heap))) fail("memory");
    int place = waiting++;
    for (; place && before(packet, heap[(place - 1) / 2]); place = (place - 1) / 2) heap[place] = heap[(place - 1) / 2];
    heap[place] = packet;
}

static struct packet *pop(void) {
    struct packet *first = heap[0], *last = heap[--waiting];
    int place = 0;
    for (int child; (child = 2 * place + 1) < waiting; place = child) {
        if (child + 1 < waiting && before(heap[child + 1], heap[child])) child++;
        if (!before(heap[child], last)) break;
        heap[place] = heap[child];
    }
    heap[place] = last;
    return first;
}

/* A number for the TCP connection of an IPv4 frame, or -1 for all else. */
static int flow_of(const unsigned char *frame, int length) {
    if (length < 38 || frame[12] != 8 || frame[13] != 0 || frame[23] != 6) return -1;
    const unsigned char *tcp = frame + 14 + (frame[14] & 15) * 4;
    if (tcp + 4 > frame + length) return -1;
    uint64_t hash = 1469598103934665603u;
    for (int i = 0; i < 8; i++) hash = (hash ^ frame[26 + i]) * 1099511628211u;
    for (int i = 0; i < 4; i++) hash = (hash ^ tcp[i]) * 1099511628211u;
    return (hash ^ hash >> 32) % FLOWS;
}

static int wire_bytes(int length) {
    return length + OVERHEAD * (1 + length / SEGMENT);
}

/* When a link that is free at *free has sent `bytes` more, handed to it at `time`; -1 when its queue is full. */
static nanoseconds send_over(nanoseconds *free_at, nanoseconds time, int bytes, double cost) {
    if (cost == 0) return time;
    nanoseconds start = *free_at > time ? *free_at : time;
    if (start - time > queue * cost) return -1;
    return *free_at = start + (nanoseconds)(bytes * cost);
}

static void accept_frame(const unsigned char *data, int length, int from, int to) {
    const unsigned char *frame = data + HEADER;
    int bytes = wire_bytes(length - HEADER), flow = flow_of(frame, length - HEADER);
    nanoseconds due = send_over(&hosts[from].up_free, now(), bytes, link_cost);
    if (due >= 0 && flow >= 0) due = send_over(&flow_free[flow], due, bytes, flow_cost);
    if (due < 0) return;
    struct packet *packet = malloc(sizeof *packet + length);
    if (!packet) fail("memory");
    *packet = (struct packet){.due = due + delay, .number = numbers++, .to = to, .length = length};
    memcpy(packet->data, data, length);
    push(packet);
}

static void receive(int from) {
    static unsigned char data[MAX_FRAME];
    for (int i = 0; i < BATCH; i++) {
        int length = read(hosts[from].device, data, sizeof data);
        if (length < 0 && errno == EAGAIN) return;
        if (length < HEADER + 14) return;
        const unsigned char *address = data + HEADER;
        if (!(address[0] & 1)) {
            if (address[5] < num_hosts && address[5] != from) accept_frame(data, length, from, address[5]);
            continue;
        }
        for (int to = 0; to < num_hosts; to++)
            if (to != from) accept_frame(data, length, from, to);
    }
}

/* Hand on all that is due. */
static void deliver(void) {
    while (waiting && heap[0]->due <= now()) {
        struct packet *packet = pop();
        if (!packet->arrived) {
            int bytes = wire_bytes(packet->length - HEADER);
            packet->due = send_over(&hosts[packet->to].down_free, packet->due, bytes, link_cost);
            packet->arrived = 1;
            if (packet->due >= 0) push(packet);
            else free(packet);
            continue;
        }
        if (write(hosts[packet->to].device, packet->data, packet->length) < 0 && errno != EAGAIN && errno != EIO)
            fail("write");
        free(packet);
    }
}

/* Give the namespace a TAP device whose other end this program holds. */
static int open_device(const char *namespace, int number) {
    char path[300];
    snprintf(path, sizeof path, "/var/run/netns/%s", namespace);
    int there = open(path, O_RDONLY | O_CLOEXEC);
    if (there < 0 || setns(there, CLONE_NEWNET)) fail(path);
    close(there);
    int device = open("/dev/net/tun", O_RDWR | O_NONBLOCK | O_CLOEXEC);
    if (device < 0) fail("/dev/net/tun");
    struct ifreq request = {.ifr_name = "bench0", .ifr_flags = IFF_TAP | IFF_NO_PI | IFF_VNET_HDR};
    if (ioctl(device, TUNSETIFF, &request)) fail("TUNSETIFF");
    if (ioctl(device, TUNSETOFFLOAD, TUN_F_CSUM | TUN_F_TSO4)) fail("TUNSETOFFLOAD");
    unsigned char address[6] = {2, 0, 0, 0, 0, (unsigned char)number};
    request.ifr_hwaddr.sa_family = ARPHRD_ETHER;
    memcpy(request.ifr_hwaddr.sa_data, address, sizeof address);
    int socket_there = socket(AF_INET, SOCK_DGRAM | SOCK_CLOEXEC, 0);
    if (socket_there < 0 || ioctl(socket_there, SIOCSIFHWADDR, &request)) fail("SIOCSIFHWADDR");
    close(socket_there);
    return device;
}

int main(int argc, char **argv) {
    if (argc < 6 || argc - 5 > MAX_HOSTS) {
        fprintf(stderr, "usage: switch RATE DELAY FLOW QUEUE NAMESPACE...\n");
        return 2;
    }
    double rate = atof(argv[1]), flow = atof(argv[3]);
    link_cost = rate > 0 ? 8000 / rate : 0;
    flow_cost = flow > 0 ? 8000 / flow : 0;
    delay = atoll(argv[2]) * 1000;
    queue = atof(argv[4]) * 1024;
    num_hosts = argc - 5;
    int home = open("/proc/self/ns/net", O_RDONLY | O_CLOEXEC);
    struct pollfd polled[MAX_HOSTS];
    for (int i = 0; i < num_hosts; i++) {
        hosts[i].device = open_device(argv[5 + i], i);
        if (setns(home, CLONE_NEWNET)) fail("setns");
        polled[i] = (struct pollfd){.fd = hosts[i].device, .events = POLLIN};
    }
    puts("ready");
    fflush(stdout);
    for (;;) {
        struct timespec pause = {0, 0};
        if (waiting) {
            nanoseconds left = heap[0]->due - now();
            if (left > 0) pause = (struct timespec){left / 1000000000, left % 1000000000};
        }
        if (ppoll(polled, num_hosts, waiting ? &pause : NULL, NULL) < 0 && errno != EINTR) fail("ppoll");
        for (int i = 0; i < num_hosts; i++)
            if (polled[i].revents & POLLIN) receive(i);
        deliver();
    }
}
