#!/bin/sh
# Prints a kubeconfig with the account of deploy/member-account.yaml, for the controller in the hub.
#   deploy/member-kubeconfig.sh SERVER [KUBECTL ...]
# SERVER = https://HOST:PORT of this member's API server as the hub's pods reach it. KUBECTL = the kubectl command that
# reaches this member (default: kubectl). Put the output into a Secret of the hub, under the key `value`:
#   deploy/member-kubeconfig.sh https://tenant-a.example:6443 kubectl --context tenant-a |
#     kubectl --context hub -n clustermesh create secret generic tenant-a-kubeconfig --from-file=value=/dev/stdin
set -eu
[ $# -ge 1 ] || { sed -n '2,7s/^# //p' "$0" >&2; exit 2; }
server=$1
shift
[ $# -gt 0 ] || set -- kubectl
secret() { "$@" -n clustermesh get secret clustermesh-controller -o "jsonpath={.data.$field}"; }
# Kubernetes writes the token into the Secret some moments after the Secret is created.
for second in 1 2 3 4 5 6 7 8 9 10; do
  field=token
  token=$(secret "$@" | base64 -d)
  field='ca\.crt'
  ca=$(secret "$@")
  [ -z "$token" ] || [ -z "$ca" ] || break
  sleep 1
done
if [ -z "$token" ] || [ -z "$ca" ]; then
  echo "Secret clustermesh/clustermesh-controller contains no token or no ca.crt after $second seconds: does kube-controller-manager run?" >&2
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
