#!/usr/bin/env bash
# Prints docker/prometheus' rules for the Prometheus Operator: kubectl apply -f <(docker/clouds/kubernetes/rules.sh)
set -euo pipefail
cd "$(dirname "$0")/../../prometheus"
for rules in recording alerts; do
    cat <<END
---
apiVersion: monitoring.coreos.com/v1
kind: PrometheusRule
metadata:
  name: noloco-$rules
  labels:
    app.kubernetes.io/part-of: noloco
spec:
$(sed 's/^/  /' "$rules.yml")
END
done
