/* SPDX-License-Identifier: GPL-2.0 */
/*
 * napi_macvlan: what its files share.
 *
 * One port (struct nmv_port) sits on a lower device while at least one of our
 * devices on it is up. A device (struct nmv_dev) is a network device of kind
 * napi_macvlan, or of kind napi_macvtap with a struct tap_dev inside.
 *
 * Locking: everything is changed under RTNL and read under RCU. Counters are
 * per CPU and written with bottom halves off. The own queue has its list lock.
 * The lock of a broadcast queue is taken before that of an own queue or a ring.
 */
#ifndef NMV_H
#define NMV_H

#include <linux/etherdevice.h>
#include <linux/if_tap.h>
#include <linux/netdevice.h>
#include <linux/u64_stats_sync.h>
#include "mode.h"

#define NMV_QUEUE_LEN		1000	/* frames, default of the own queue */
#define NMV_QUEUE_LEN_MAX	32767
#define NMV_QUEUE_BYTES		(16 << 20)	/* memory of waiting frames */
#define NMV_BCAST_LEN		1000	/* frames, the broadcast queue of a port */
#define NMV_TAP_QUEUE_LEN	500	/* frames, default of a tap ring */
#define NMV_TAP_SHOWN		16	/* tap queues in "ethtool -S", by default */
/* Most segments that are made of a frame: 64 KiB in pieces of 32 bytes. */
#define NMV_TAP_SEGMENTS	2048
/* For so long frames may wait in a ring that nobody takes one from. */
#define NMV_TAP_PATIENCE	(HZ / 4)
/* So long after a frame was lost at a ring, so many of its places, and of a
 * short one an eighth, are for control frames alone.
 */
#define NMV_TAP_FULL		HZ
#define NMV_TAP_RESERVE		64

/* What "ethtool -S" shows of every device, in this order. */
enum nmv_stat {
	NMV_RX_RECEIVED,
	NMV_RX_DELIVERED,
	NMV_RX_DROPPED_RING_FULL,
	NMV_RX_DROPPED_QUEUE_FULL,
	NMV_RX_DROPPED_QUEUE_BYTES,
	NMV_RX_DROPPED_NO_QUEUE,
	NMV_RX_DROPPED_DOWN,
	NMV_RX_DROPPED_SHRINK,
	NMV_RX_DROPPED_OTHER,
	NMV_RX_NIC,
	NMV_RX_FORWARDED,
	NMV_RX_BROADCAST,
	NMV_RX_COPIED,
	NMV_RX_DIVERTED,
	NMV_TX_LOWER,
	NMV_TX_SIBLING,
	NMV_TX_DROPPED,
	/* shown in ip -s link only */
	NMV_RX_BYTES,
	NMV_TX_BYTES,
	NMV_RX_MULTICAST,
	NMV_STATS,
};

#define NMV_STATS_SHOWN		NMV_RX_BYTES

struct nmv_pcpu {
	u64_stats_t		v[NMV_STATS];
	struct u64_stats_sync	syncp;
};

/**
 * struct nmv_queue - the own queue of a device
 * @frames: waiting frames; its lock guards all up to @high_water but @limit
 * @limit: most frames that may wait
 * @bytes: memory that the waiting frames take, as skb->truesize tells
 * @multicast: how many of the waiting frames are multicast
 * @multicast_bytes: memory of those
 * @high_water: most frames that ever waited since the device came up
 * @napi: serves @frames
 */
struct nmv_queue {
	struct sk_buff_head	frames;
	u32			limit;
	u32			bytes;
	u32			multicast;
	u32			multicast_bytes;
	u32			high_water;
	struct napi_struct	napi;
};

struct nmv_tapq_pcpu {
	u64_stats_t		delivered;
	u64_stats_t		dropped;
	struct u64_stats_sync	syncp;
};

/**
 * struct nmv_tapq - what we know about one open queue of /dev/tapN
 * @list: in nmv_tap.known, under RTNL
 * @q: tap.ko's queue; a key, not to be followed except under the rules of
 *	tapq.c
 * @counts: frames put into its ring, and those that found no room
 * @looked: jiffies of the last look at the ring; with @ring_high_water,
 *	@read_to and @read_at written under the producer lock of the ring
 * @ring_high_water: most frames that were seen waiting in the ring
 * @read_to: the place in the ring from which the next frame is taken, as last
 *	looked at
 * @read_at: jiffies when that was new, or the ring empty
 * @full_at: jiffies when a frame was last lost at the ring
 * @tx_packets: frames sent through it
 * @tid: of the task that sent last, in the initial pid namespace
 * @sender: the task that is sending now
 * @rcu: to free it
 */
struct nmv_tapq {
	struct list_head	list;
	struct tap_queue	*q;
	struct nmv_tapq_pcpu __percpu *counts;
	unsigned long		looked;
	u32			ring_high_water;
	u32			read_to;
	unsigned long		read_at;
	unsigned long		full_at;
	atomic64_t		tx_packets;
	pid_t			tid;
	struct task_struct	*sender;
	struct rcu_head		rcu;
};

/**
 * struct nmv_tapq_stats - of an open queue
 * @delivered: frames put into the ring
 * @dropped: frames that found no room
 * @high_water: most frames that were seen waiting in the ring
 * @stalled: frames wait and nobody reads
 */
struct nmv_tapq_stats {
	u64			delivered;
	u64			dropped;
	u32			high_water;
	bool			stalled;
};

/**
 * struct nmv_tap - the part of a device that only napi_macvtap has
 * @tap: tap.ko's view of the device
 * @slots: by queue index, what we know about that queue
 * @known: all struct nmv_tapq, under RTNL
 * @scan: looks for queues opened and closed
 * @scanned: jiffies when it last did
 * @rx_features: what the guest lets us receive, as tap.ko tells
 * @every_queue: frames about neighbours go to every open queue; set under RTNL
 */
struct nmv_tap {
	struct tap_dev		tap;
	struct nmv_tapq __rcu	*slots[MAX_TAP_QUEUES];
	struct list_head	known;
	struct delayed_work	scan;
	unsigned long		scanned;
	netdev_features_t	rx_features;
	bool			every_queue;
};

/**
 * struct nmv_bcast - broadcast and multicast from the NIC, on its way to the
 *	devices of a port
 * @frames: waiting frames; its lock guards @bytes
 * @bytes: memory that they take
 * @dropped: frames that found no room, or no memory
 * @lock: guards @skb and @next
 * @skb: the frame that is being copied
 * @next: the device that gets the next copy of it; NULL after the last
 * @dev: no device, but what a NAPI instance must belong to
 * @napi: copies
 */
struct nmv_bcast {
	struct sk_buff_head	frames;
	u32			bytes;
	atomic64_t		dropped;
	spinlock_t		lock;
	struct sk_buff		*skb;
	struct nmv_dev		*next;
	struct net_device	*dev;
	struct napi_struct	napi;
};

/**
 * struct nmv_port - our hold on a lower device, from the first device up to
 * the last one down
 * @lower: the device below
 * @hash: devices by MAC
 * @devs: the same devices, in the order of coming up
 * @count: how many
 * @uplink: of those, the one with the flag uplink, or NULL
 * @passthru: the one device takes every frame
 * @perm_addr: MAC that @lower gets back when the passthru device goes down:
 *	what it had before, or what the administrator gave it since
 * @lending: it is we who change the MAC of @lower
 * @bcast: frames for many of the devices
 * @rcu: to free it
 */
struct nmv_port {
	struct net_device	*lower;
	struct hlist_head	hash[NMV_HASH_SIZE];
	struct list_head	devs;
	unsigned int		count;
	struct nmv_dev __rcu	*uplink;
	bool			passthru;
	u8			perm_addr[ETH_ALEN];
	bool			lending;
	struct nmv_bcast	bcast;
	struct rcu_head		rcu;
};

/**
 * struct nmv_dev - private part of a network device of ours
 * @dev: the network device
 * @lower: the device below, with a reference
 * @tracker: of that reference
 * @port: while up
 * @mode: enum macvlan_mode
 * @in_hash: in nmv_port.hash, while up
 * @in_port: in nmv_port.devs, while up
 * @uplink: gets what siblings send to addresses that none of them has; under
 *	RTNL
 * @mc_filter: multicast addresses it listens to, hashed
 * @stats: counters
 * @queue: the own queue
 * @tap: NULL for napi_macvlan
 */
struct nmv_dev {
	struct net_device	*dev;
	struct net_device	*lower;
	netdevice_tracker	tracker;
	struct nmv_port __rcu	*port;
	u32			mode;
	struct hlist_node	in_hash;
	struct list_head	in_port;
	bool			uplink;
	DECLARE_BITMAP(mc_filter, NMV_MC_BITS);
	struct nmv_pcpu __percpu *stats;
	struct nmv_queue	queue;
	struct nmv_tap		*tap;
};

/* A napi_macvtap device carries both. */
struct nmv_tap_dev {
	struct nmv_dev		nd;
	struct nmv_tap		tap;
};

static inline struct nmv_dev *nmv_tap_owner(struct tap_dev *tap)
{
	return &container_of(tap, struct nmv_tap_dev, tap.tap)->nd;
}

/* netlink.c */
extern struct rtnl_link_ops nmv_vlan_ops, nmv_tap_ops;
bool nmv_is_ours(const struct net_device *dev);

/* netdev.c */
void nmv_setup(struct net_device *dev);

/* port.c */
extern struct notifier_block nmv_port_notifier;
int nmv_port_join(struct nmv_dev *nd);
void nmv_port_leave(struct nmv_dev *nd);
void nmv_port_rehash(struct nmv_dev *nd, const u8 *addr);
struct nmv_dev *nmv_port_find(const struct nmv_port *port, const u8 *addr);
bool nmv_port_taken(const struct nmv_dev *nd, const u8 *addr);
int nmv_port_set_uplink(struct nmv_dev *nd, bool on);

/* bcast.c */
int nmv_bcast_init(struct nmv_port *port);
void nmv_bcast_exit(struct nmv_port *port);
void nmv_bcast_add(struct nmv_port *port, struct sk_buff *skb);
void nmv_bcast_forget(struct nmv_port *port, struct nmv_dev *nd);

/* rx.c */
rx_handler_result_t nmv_handle_frame(struct sk_buff **pskb);

/* tx.c */
netdev_tx_t nmv_start_xmit(struct sk_buff *skb, struct net_device *dev);

/* queue.c */
void nmv_queue_init(struct nmv_dev *nd);
void nmv_queue_exit(struct nmv_dev *nd);
void nmv_queue_stop(struct nmv_dev *nd);
bool nmv_queue_admits(u32 waiting, u32 limit);
bool nmv_queue_admits_multicast(u32 waiting, u32 limit);
void nmv_queue_delivered(struct nmv_dev *nd, const struct sk_buff *skb);
void nmv_queue_offer(struct nmv_dev *nd, struct sk_buff *skb);
void nmv_queue_offer_copy(struct nmv_dev *nd, struct sk_buff *skb,
			  bool from_sibling);

/* tap.c */
extern struct notifier_block nmv_tap_notifier;
int nmv_tap_register(void);
void nmv_tap_unregister(void);
int nmv_tap_attach(struct nmv_dev *nd);
void nmv_tap_detach(struct nmv_dev *nd);

/* taprx.c */
void nmv_tap_rx_dropped(struct tap_dev *tap);
bool nmv_is_discovery(const struct sk_buff *skb);
bool nmv_is_control(const struct sk_buff *skb);
rx_handler_result_t nmv_tap_receive(struct sk_buff **pskb);
bool nmv_tap_early_drop(struct nmv_dev *nd, struct sk_buff *skb,
			enum skb_drop_reason *reason);
u32 nmv_tap_places(const struct tap_dev *tap, const struct tap_queue *q,
		   struct sk_buff *skb);
bool nmv_ring_room(struct ptr_ring *r, u32 places);
u32 nmv_ring_used(const struct ptr_ring *r, u32 *head);
void nmv_tapq_read(struct nmv_tapq *slot, struct nmv_tapq_stats *s);

/* tapq.c */
void nmv_tapq_init(struct nmv_tap *t);
void nmv_tapq_exit(struct nmv_tap *t);
void nmv_tapq_scan(struct nmv_tap *t);
void nmv_tapq_ask(struct nmv_tap *t);
struct nmv_tapq *nmv_tapq_find(struct nmv_tap *t, struct tap_queue *q);
void nmv_tapq_sent(struct nmv_tap *t, struct sock *sk);

/* stats.c */
void nmv_count(struct nmv_dev *nd, enum nmv_stat what, u64 n);
void nmv_count_frame(struct nmv_dev *nd, enum nmv_stat what,
		     enum nmv_stat also, u64 n);
void nmv_stats_sum(const struct nmv_dev *nd, u64 *sum);
void nmv_get_stats64(struct net_device *dev, struct rtnl_link_stats64 *s);
void nmv_stats_setup(struct net_device *dev);

/* ethtool.c */
extern const struct ethtool_ops nmv_ethtool_ops;

/* selftest.c */
#ifdef NMV_DEBUG
int nmv_selftest(void);
/* mistakes.c */
int nmv_mistake(void);
#else
static inline int nmv_selftest(void)
{
	return 0;
}
#endif

#endif
