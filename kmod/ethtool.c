// SPDX-License-Identifier: GPL-2.0
/* Counters as "ethtool -S" shows them, and the rest of ethtool. */
#include <linux/capability.h>
#include <linux/ethtool.h>
#include <linux/module.h>
#include <linux/rtnetlink.h>
#include "nmv.h"
#include "nmv_compat.h"

static const char nmv_names[NMV_STATS_SHOWN][ETH_GSTRING_LEN] = {
	[NMV_RX_RECEIVED]		= "rx_received",
	[NMV_RX_DELIVERED]		= "rx_delivered",
	[NMV_RX_DROPPED_RING_FULL]	= "rx_dropped_ring_full",
	[NMV_RX_DROPPED_QUEUE_FULL]	= "rx_dropped_queue_full",
	[NMV_RX_DROPPED_QUEUE_BYTES]	= "rx_dropped_queue_bytes",
	[NMV_RX_DROPPED_NO_QUEUE]	= "rx_dropped_no_queue",
	[NMV_RX_DROPPED_DOWN]		= "rx_dropped_down",
	[NMV_RX_DROPPED_SHRINK]		= "rx_dropped_shrink",
	[NMV_RX_DROPPED_OTHER]		= "rx_dropped_other",
	[NMV_RX_NIC]			= "rx_nic",
	[NMV_RX_FORWARDED]		= "rx_forwarded",
	[NMV_RX_BROADCAST]		= "rx_broadcast",
	[NMV_RX_COPIED]			= "rx_copied",
	[NMV_RX_DIVERTED]		= "rx_diverted",
	[NMV_TX_LOWER]			= "tx_packets_lower",
	[NMV_TX_SIBLING]		= "tx_to_sibling",
	[NMV_TX_DROPPED]		= "tx_dropped",
};

static const char nmv_queue_names[][ETH_GSTRING_LEN] = {
	"queue_high_water", "napi_thread_tid", "port_dropped_broadcast",
};

static const char * const nmv_tapq_names[] = {
	"received", "delivered", "dropped_ring_full", "ring_high_water",
	"tx_packets", "worker_tid", "stalled",
};

static const char nmv_flag_names[][ETH_GSTRING_LEN] = {
	"every-queue",
	"uplink",
};

/* By place in nmv_flag_names. */
#define NMV_FLAG_EVERY_QUEUE	BIT(0)
#define NMV_FLAG_UPLINK		BIT(1)

/* Queues to show: the open ones, by number. */
static int nmv_shown_queues(struct nmv_dev *nd)
{
	return nd->tap ? nd->tap->tap.numvtaps : 0;
}

static int nmv_get_sset_count(struct net_device *dev, int sset)
{
	struct nmv_dev *nd = netdev_priv(dev);

	if (sset == ETH_SS_PRIV_FLAGS && nd->tap)
		return ARRAY_SIZE(nmv_flag_names);
	if (sset != ETH_SS_STATS)
		return -EOPNOTSUPP;
	return NMV_STATS_SHOWN + ARRAY_SIZE(nmv_queue_names) +
	       nmv_shown_queues(nd) * ARRAY_SIZE(nmv_tapq_names);
}

static void nmv_get_strings(struct net_device *dev, u32 sset, u8 *data)
{
	struct nmv_dev *nd = netdev_priv(dev);
	int i, n;

	if (sset == ETH_SS_PRIV_FLAGS)
		memcpy(data, nmv_flag_names, sizeof(nmv_flag_names));
	if (sset != ETH_SS_STATS)
		return;
	memcpy(data, nmv_names, sizeof(nmv_names));
	data += sizeof(nmv_names);
	memcpy(data, nmv_queue_names, sizeof(nmv_queue_names));
	data += sizeof(nmv_queue_names);
	for (i = 0; i < nmv_shown_queues(nd); i++)
		for (n = 0; n < ARRAY_SIZE(nmv_tapq_names); n++) {
			snprintf(data, ETH_GSTRING_LEN, "tapq%d_%s", i,
				 nmv_tapq_names[n]);
			data += ETH_GSTRING_LEN;
		}
}

/* Of one open queue, in the order of nmv_tapq_names. */
static void nmv_tapq_values(struct nmv_tapq *slot, u64 *v)
{
	struct nmv_tapq_stats s;

	local_bh_disable();
	nmv_tapq_read(slot, &s);
	local_bh_enable();
	v[0] = s.delivered + s.dropped;
	v[1] = s.delivered;
	v[2] = s.dropped;
	v[3] = s.high_water;
	v[4] = atomic64_read(&slot->tx_packets);
	v[5] = READ_ONCE(slot->tid);
	v[6] = s.stalled;
}

/*
 * The thread is made and ended under RTNL, and on newer kernels under the
 * lock of the device alone. Once made it may stay when "threaded" is 0 again,
 * without work.
 */
static u64 nmv_thread_id(struct nmv_dev *nd)
{
	const struct napi_struct *napi = &nd->queue.napi;
	u64 id = 0;

	nmv_netdev_lock(nd->dev);
	if (napi->thread && test_bit(NAPI_STATE_THREADED, &napi->state))
		id = task_pid_nr(napi->thread);
	nmv_netdev_unlock(nd->dev);
	return id;
}

static void nmv_get_stats(struct net_device *dev, struct ethtool_stats *stats,
			  u64 *data)
{
	struct nmv_dev *nd = netdev_priv(dev);
	struct nmv_port *port = rtnl_dereference(nd->port);
	struct nmv_tapq *slot;
	u64 sum[NMV_STATS];
	int i, n;

	/* Queues opened since the last frame get their place now. */
	if (nd->tap)
		nmv_tapq_scan(nd->tap);
	nmv_stats_sum(nd, sum);
	memcpy(data, sum, NMV_STATS_SHOWN * sizeof(*data));
	data += NMV_STATS_SHOWN;
	*data++ = READ_ONCE(nd->queue.high_water);
	*data++ = nmv_thread_id(nd);
	*data++ = port ? atomic64_read(&port->bcast.dropped) : 0;
	n = nmv_shown_queues(nd);
	for (i = 0; i < n; i++, data += ARRAY_SIZE(nmv_tapq_names)) {
		slot = rtnl_dereference(nd->tap->slots[i]);
		if (slot)
			nmv_tapq_values(slot, data);
		else
			memset(data, 0, ARRAY_SIZE(nmv_tapq_names) * sizeof(*data));
	}
}

static u32 nmv_get_priv_flags(struct net_device *dev)
{
	struct nmv_dev *nd = netdev_priv(dev);
	u32 flags = 0;

	if (nd->tap && nd->tap->every_queue)
		flags |= NMV_FLAG_EVERY_QUEUE;
	if (nd->uplink)
		flags |= NMV_FLAG_UPLINK;
	return flags;
}

static int nmv_set_priv_flags(struct net_device *dev, u32 flags)
{
	struct nmv_dev *nd = netdev_priv(dev);
	int err;

	if (!nd->tap)
		return -EOPNOTSUPP;
	if (flags & ~(NMV_FLAG_EVERY_QUEUE | NMV_FLAG_UPLINK))
		return -EINVAL;
	/* It takes what siblings send: for who rules the lower device. */
	if ((flags & NMV_FLAG_UPLINK) && !nd->uplink &&
	    !ns_capable(dev_net(nd->lower)->user_ns, CAP_NET_ADMIN))
		return -EPERM;
	err = nmv_port_set_uplink(nd, flags & NMV_FLAG_UPLINK);
	if (err)
		return err;
	WRITE_ONCE(nd->tap->every_queue, flags & NMV_FLAG_EVERY_QUEUE);
	return 0;
}

static void nmv_get_drvinfo(struct net_device *dev,
			    struct ethtool_drvinfo *info)
{
	strscpy(info->driver, dev->rtnl_link_ops->kind, sizeof(info->driver));
	if (THIS_MODULE->version)
		strscpy(info->version, THIS_MODULE->version,
			sizeof(info->version));
}

static int nmv_get_link_ksettings(struct net_device *dev,
				  struct ethtool_link_ksettings *cmd)
{
	struct nmv_dev *nd = netdev_priv(dev);

	return __ethtool_get_link_ksettings(nd->lower, cmd);
}

const struct ethtool_ops nmv_ethtool_ops = {
	.get_drvinfo		= nmv_get_drvinfo,
	.get_link		= ethtool_op_get_link,
	.get_link_ksettings	= nmv_get_link_ksettings,
	.get_sset_count		= nmv_get_sset_count,
	.get_strings		= nmv_get_strings,
	.get_ethtool_stats	= nmv_get_stats,
	.get_priv_flags		= nmv_get_priv_flags,
	.set_priv_flags		= nmv_set_priv_flags,
};
