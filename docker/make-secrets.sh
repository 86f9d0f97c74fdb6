#!/bin/sh
# Makes the files that the compose files need: keys of an admin, a user and Prometheus, Grafana's password, an empty
# configuration of pip, and `.env`.
# Files that exist are kept.
set -eu
cd "$(dirname "$0")"

random() {
    od -An -N24 -tx1 /dev/urandom | tr -d ' \n'
}

# Containers run as other users, so the files are readable; the directory keeps everybody else on the host out.
mkdir -p secrets models
chmod 700 secrets
if [ ! -e secrets/api_keys ]; then
    rm -f secrets/admin_key secrets/metrics_key
    admin=$(random)
    printf '%s' "$admin" > secrets/admin_key
    printf 'admin %s admin\nuser %s\n' "$admin" "$(random)" > secrets/api_keys
fi
if [ ! -e secrets/metrics_key ]; then
    chmod u+w secrets/api_keys
    metrics=$(random)
    printf '%s' "$metrics" > secrets/metrics_key
    printf '\nprometheus %s metrics\n' "$metrics" >> secrets/api_keys
fi
[ -e secrets/pip.conf ] || : > secrets/pip.conf
[ -e secrets/grafana_password ] || random > secrets/grafana_password
chmod 444 secrets/*
[ -e .env ] || cp .env.example .env
echo "keys are in $(pwd)/secrets"
