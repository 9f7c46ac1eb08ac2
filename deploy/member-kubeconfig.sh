#!/bin/sh
# Prints the kubeconfig that gives a hub's controller the least-privilege account of deploy/member-account.yaml.
#   deploy/member-kubeconfig.sh SERVER [KUBECTL ...]
# SERVER = https://HOST:PORT of this member's API server as the hub's pods reach it. KUBECTL = the kubectl command that
# reaches this member (default: kubectl). Put the output into a Secret of the hub, under the key `value`:
#   deploy/member-kubeconfig.sh https://tenant-a.example:6443 kubectl --context tenant-a |
#     kubectl --context hub -n clustermesh create secret generic tenant-a-kubeconfig --from-file=value=/dev/stdin
set -eu
[ $# -ge 1 ] || { sed -n '2,6s/^# //p' "$0" >&2; exit 2; }
server=$1
shift
[ $# -gt 0 ] || set -- kubectl
secret() { "$@" -n clustermesh get secret clustermesh-controller -o "jsonpath={.data.$field}"; }
field=token
token=$(secret "$@" | base64 -d)
field='ca\.crt'
ca=$(secret "$@")
if [ -z "$token" ] || [ -z "$ca" ]; then
  echo "Secret clustermesh/clustermesh-controller holds no token yet: apply deploy/member-account.yaml and try again" >&2
  exit 1
fi
cat <<Y
apiVersion: v1
kind: Config
clusters:
- name: member
  cluster:
    server: $server
    certificate-authority-data: $ca
users:
- name: clustermesh-controller
  user:
    token: $token
contexts:
- name: member
  context: {cluster: member, user: clustermesh-controller}
current-context: member
Y
