// SPDX-License-Identifier: GPL-2.0
/* Counters: 64 bits, per CPU, summed when read. */
#include "nmv.h"
#include "nmv_compat.h"
#ifdef NMV_HAVE_QUEUE_STATS
#include <net/netdev_queues.h>
#endif

/**
 * nmv_count() - add to a counter
 * @nd: device
 * @what: counter
 * @n: how much
 *
 * Context: bottom halves off.
 */
void nmv_count(struct nmv_dev *nd, enum nmv_stat what, u64 n)
{
	struct nmv_pcpu *p = this_cpu_ptr(nd->stats);

	u64_stats_update_begin(&p->syncp);
	u64_stats_add(&p->v[what], n);
	u64_stats_update_end(&p->syncp);
}

/**
 * nmv_count_frame() - count one frame
 * @nd: device
 * @what: counter of frames
 * @also: another counter
 * @n: what that one gets
 *
 * Context: bottom halves off.
 */
void nmv_count_frame(struct nmv_dev *nd, enum nmv_stat what,
		     enum nmv_stat also, u64 n)
{
	struct nmv_pcpu *p = this_cpu_ptr(nd->stats);

	u64_stats_update_begin(&p->syncp);
	u64_stats_inc(&p->v[what]);
	u64_stats_add(&p->v[also], n);
	u64_stats_update_end(&p->syncp);
}

/**
 * nmv_stats_sum() - all counters of a device over all CPUs
 * @nd: device
 * @sum: NMV_STATS values
 */
void nmv_stats_sum(const struct nmv_dev *nd, u64 *sum)
{
	u64 v[NMV_STATS];
	unsigned int start;
	int cpu, i;

	memset(sum, 0, sizeof(*sum) * NMV_STATS);
	for_each_possible_cpu(cpu) {
		const struct nmv_pcpu *p = per_cpu_ptr(nd->stats, cpu);

		do {
			start = u64_stats_fetch_begin(&p->syncp);
			for (i = 0; i < NMV_STATS; i++)
				v[i] = u64_stats_read(&p->v[i]);
		} while (u64_stats_fetch_retry(&p->syncp, start));
		for (i = 0; i < NMV_STATS; i++)
			sum[i] += v[i];
	}
}

void nmv_get_stats64(struct net_device *dev, struct rtnl_link_stats64 *s)
{
	u64 v[NMV_STATS];
	int i;

	nmv_stats_sum(netdev_priv(dev), v);
	s->rx_packets = v[NMV_RX_DELIVERED];
	s->rx_bytes = v[NMV_RX_BYTES];
	s->multicast = v[NMV_RX_MULTICAST];
	for (i = NMV_RX_DROPPED_RING_FULL; i <= NMV_RX_DROPPED_OTHER; i++)
		s->rx_dropped += v[i];
	s->tx_packets = v[NMV_TX_LOWER] + v[NMV_TX_SIBLING];
	s->tx_bytes = v[NMV_TX_BYTES];
	s->tx_dropped = v[NMV_TX_DROPPED];
}

#ifdef NMV_HAVE_QUEUE_STATS
static void nmv_queue_stats_rx(struct net_device *dev, int idx,
			       struct netdev_queue_stats_rx *rx)
{
	u64 v[NMV_STATS];
	int i;

	nmv_stats_sum(netdev_priv(dev), v);
	rx->packets = v[NMV_RX_DELIVERED];
	rx->bytes = v[NMV_RX_BYTES];
	rx->hw_drops = 0;
	for (i = NMV_RX_DROPPED_RING_FULL; i <= NMV_RX_DROPPED_OTHER; i++)
		rx->hw_drops += v[i];
	rx->hw_drop_overruns = v[NMV_RX_DROPPED_RING_FULL] +
			       v[NMV_RX_DROPPED_QUEUE_FULL] +
			       v[NMV_RX_DROPPED_QUEUE_BYTES];
}

static void nmv_queue_stats_tx(struct net_device *dev, int idx,
			       struct netdev_queue_stats_tx *tx)
{
	u64 v[NMV_STATS];

	nmv_stats_sum(netdev_priv(dev), v);
	tx->packets = v[NMV_TX_LOWER] + v[NMV_TX_SIBLING];
	tx->bytes = v[NMV_TX_BYTES];
	tx->hw_drops = v[NMV_TX_DROPPED];
}

/* Nothing passes the device but through its one queue of each direction. */
static void nmv_base_stats(struct net_device *dev,
			   struct netdev_queue_stats_rx *rx,
			   struct netdev_queue_stats_tx *tx)
{
	rx->packets = 0;
	rx->bytes = 0;
	rx->hw_drops = 0;
	rx->hw_drop_overruns = 0;
	tx->packets = 0;
	tx->bytes = 0;
	tx->hw_drops = 0;
}

static const struct netdev_stat_ops nmv_stat_ops = {
	.get_queue_stats_rx	= nmv_queue_stats_rx,
	.get_queue_stats_tx	= nmv_queue_stats_tx,
	.get_base_stats		= nmv_base_stats,
};
#endif

/**
 * nmv_stats_setup() - offer the counters as the kernel's queue statistics
 * @dev: device that is being made
 */
void nmv_stats_setup(struct net_device *dev)
{
#ifdef NMV_HAVE_QUEUE_STATS
	dev->stat_ops = &nmv_stat_ops;
#endif
}
