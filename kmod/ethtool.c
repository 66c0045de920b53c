// SPDX-License-Identifier: GPL-2.0
/* Counters as "ethtool -S" shows them, and the rest of ethtool. */
#include <linux/ethtool.h>
#include <linux/module.h>
#include <linux/rtnetlink.h>
#include "nmv.h"

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
	"queue_high_water", "port_dropped_broadcast", "tap_queues",
};

static const char * const nmv_tapq_names[] = {
	"received", "delivered", "dropped_ring_full", "ring_high_water",
	"tx_packets", "worker_tid", "stalled",
};

/*
 * Queues to show, open or not. A reader asks for the count and makes room, and
 * kernels older than the check of that (6.1.160, 6.12.64) write as many values
 * as there are by then. So opening a queue must not change the count.
 */
static int nmv_shown_queues(const struct net_device *dev)
{
	const struct nmv_dev *nd = netdev_priv(dev);

	return nd->tap ? min_t(u32, dev->num_rx_queues, MAX_TAP_QUEUES) : 0;
}

static int nmv_get_sset_count(struct net_device *dev, int sset)
{
	if (sset != ETH_SS_STATS)
		return -EOPNOTSUPP;
	return NMV_STATS_SHOWN + ARRAY_SIZE(nmv_queue_names) +
	       nmv_shown_queues(dev) * ARRAY_SIZE(nmv_tapq_names);
}

static void nmv_get_strings(struct net_device *dev, u32 sset, u8 *data)
{
	int i, n;

	if (sset != ETH_SS_STATS)
		return;
	memcpy(data, nmv_names, sizeof(nmv_names));
	data += sizeof(nmv_names);
	memcpy(data, nmv_queue_names, sizeof(nmv_queue_names));
	data += sizeof(nmv_queue_names);
	for (i = 0; i < nmv_shown_queues(dev); i++)
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
	*data++ = port ? atomic64_read(&port->bcast.dropped) : 0;
	*data++ = nd->tap ? nd->tap->tap.numvtaps : 0;
	n = nmv_shown_queues(dev);
	for (i = 0; i < n; i++, data += ARRAY_SIZE(nmv_tapq_names)) {
		/* The scan has left none beyond the open ones. */
		slot = rtnl_dereference(nd->tap->slots[i]);
		if (slot)
			nmv_tapq_values(slot, data);
		else
			memset(data, 0, ARRAY_SIZE(nmv_tapq_names) * sizeof(*data));
	}
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

#ifdef NMV_HAVE_TS_INFO
static int nmv_get_ts_info(struct net_device *dev,
			   struct kernel_ethtool_ts_info *info)
{
	struct nmv_dev *nd = netdev_priv(dev);

	return ethtool_get_ts_info_by_layer(nd->lower, info);
}
#endif

const struct ethtool_ops nmv_ethtool_ops = {
	.get_drvinfo		= nmv_get_drvinfo,
	.get_link		= ethtool_op_get_link,
	.get_link_ksettings	= nmv_get_link_ksettings,
	.get_sset_count		= nmv_get_sset_count,
	.get_strings		= nmv_get_strings,
	.get_ethtool_stats	= nmv_get_stats,
#ifdef NMV_HAVE_TS_INFO
	.get_ts_info		= nmv_get_ts_info,
#endif
};
