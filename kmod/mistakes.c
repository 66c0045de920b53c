// SPDX-License-Identifier: GPL-2.0
/*
 * Mistakes on purpose, one of each class that a detector of the kernel must
 * report. In debug builds only: "insmod napi_macvlan-selftest.ko mistake=NAME".
 */
#include <linux/delay.h>
#include <linux/kthread.h>
#include <linux/module.h>
#include <linux/rcupdate.h>
#include <linux/slab.h>
#include <linux/spinlock.h>
#include <linux/timer.h>
#include "nmv.h"

static char *mistake = "";
module_param(mistake, charp, 0);
MODULE_PARM_DESC(mistake, "what to do wrong");

static void nmv_mistake_freed(void)
{
	u8 *bytes = kmalloc(64, GFP_KERNEL);

	if (!bytes)
		return;
	OPTIMIZER_HIDE_VAR(bytes);
	kfree(bytes);
	WRITE_ONCE(bytes[8], 1);
}

static void nmv_mistake_past_end(void)
{
	u8 *bytes = kmalloc(60, GFP_KERNEL);

	if (!bytes)
		return;
	OPTIMIZER_HIDE_VAR(bytes);
	WRITE_ONCE(bytes[60], 1);
	kfree(bytes);
}

static DEFINE_SPINLOCK(nmv_first);
static DEFINE_SPINLOCK(nmv_second);

static void nmv_mistake_order(void)
{
	spin_lock(&nmv_first);
	spin_lock(&nmv_second);
	spin_unlock(&nmv_second);
	spin_unlock(&nmv_first);

	spin_lock(&nmv_second);
	spin_lock(&nmv_first);
	spin_unlock(&nmv_first);
	spin_unlock(&nmv_second);
}

static void nmv_mistake_sleep(void)
{
	spin_lock(&nmv_first);
	msleep(1);
	spin_unlock(&nmv_first);
}

static int __rcu *nmv_pointer;

static void nmv_mistake_rcu(void)
{
	pr_info("without protection: %p\n", rcu_dereference(nmv_pointer));
}

struct nmv_timed {
	struct timer_list timer;
};

static void nmv_never(struct timer_list *timer)
{
}

static void nmv_mistake_object(void)
{
	struct nmv_timed *timed = kzalloc(sizeof(*timed), GFP_KERNEL);

	if (!timed)
		return;
	timer_setup(&timed->timer, nmv_never, 0);
	mod_timer(&timed->timer, jiffies + 3600 * HZ);
	kfree(timed);
}

static unsigned long nmv_raced;

static int nmv_racer(void *unused)
{
	while (!kthread_should_stop()) {
		nmv_raced++;
		cond_resched();
	}
	return 0;
}

static void nmv_mistake_race(void)
{
	struct task_struct *racers[2];
	int i;

	for (i = 0; i < ARRAY_SIZE(racers); i++)
		racers[i] = kthread_run(nmv_racer, NULL, "nmv-racer/%d", i);
	msleep(10 * MSEC_PER_SEC);
	for (i = 0; i < ARRAY_SIZE(racers); i++)
		if (!IS_ERR(racers[i]))
			kthread_stop(racers[i]);
}

static void nmv_mistake_null(void)
{
	int *nowhere = NULL;

	OPTIMIZER_HIDE_VAR(nowhere);
	WRITE_ONCE(*nowhere, 1);
}

static void nmv_mistake_warn(void)
{
	WARN(1, "on purpose\n");
}

static const struct {
	const char *name;
	void (*make)(void);
} nmv_mistakes[] = {
	{ "freed",	nmv_mistake_freed },
	{ "past-end",	nmv_mistake_past_end },
	{ "order",	nmv_mistake_order },
	{ "sleep",	nmv_mistake_sleep },
	{ "rcu",	nmv_mistake_rcu },
	{ "object",	nmv_mistake_object },
	{ "race",	nmv_mistake_race },
	{ "null",	nmv_mistake_null },
	{ "warn",	nmv_mistake_warn },
};

/**
 * nmv_mistake() - make the mistake that the module was loaded with
 *
 * Return: 0, or -EINVAL for one that is not known
 */
int nmv_mistake(void)
{
	int i;

	if (!*mistake)
		return 0;
	for (i = 0; i < ARRAY_SIZE(nmv_mistakes); i++) {
		if (strcmp(nmv_mistakes[i].name, mistake))
			continue;
		nmv_mistakes[i].make();
		return 0;
	}
	return -EINVAL;
}
