#!/bin/sh
# SPDX-License-Identifier: GPL-2.0
# churn.py as kselftest starts it, without words. SECONDS_OF_CHURN=60, SEED=1.
exec python3 -B "$(dirname "$0")/churn.py" "${SECONDS_OF_CHURN:-60}" "${SEED:-1}"
