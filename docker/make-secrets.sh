#!/bin/sh
# Makes the files that the compose files need: keys of an admin, a user, Prometheus and the load generator, Grafana's
# password, an empty configuration of pip, and `.env`.
# Files that exist are kept.
set -eu
cd "$(dirname "$0")"

random() {
    od -An -N24 -tx1 /dev/urandom | tr -d ' \n'
}

# FILE NAME PERMISSION
add_key() {
    key=$(random)
    chmod u+w secrets/api_keys
    printf '%s' "$key" > "secrets/$1"
    printf '\n%s %s %s\n' "$2" "$key" "$3" >> secrets/api_keys
}

# Containers run as other users, so the files are readable; the directory keeps everybody else on the host out.
mkdir -p secrets models
chmod 700 secrets
if [ ! -e secrets/api_keys ]; then
    rm -f secrets/admin_key secrets/metrics_key secrets/loadgen_key
    admin=$(random)
    printf '%s' "$admin" > secrets/admin_key
    printf '* %s\nadmin %s admin\nuser %s\n' "$(random)" "$admin" "$(random)" > secrets/api_keys
fi
[ -e secrets/metrics_key ] || add_key metrics_key prometheus metrics
[ -e secrets/loadgen_key ] || add_key loadgen_key loadgen ""
[ -e secrets/pip.conf ] || : > secrets/pip.conf
[ -e secrets/grafana_password ] || random > secrets/grafana_password
chmod 444 secrets/*
[ -e .env ] || cp .env.example .env
echo "keys are in $(pwd)/secrets"
