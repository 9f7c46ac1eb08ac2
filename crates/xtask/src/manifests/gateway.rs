//! Generates `deploy/gateway.yaml`: the gateways through which sandboxes reach Services of a cluster.

use serde_json::{Value, json};

use super::{AGENT_IMAGE, AGENT_PORT, binding, labels, namespace, role, service_account};

/// The ValidatingAdmissionPolicy for gateways. It is in a YAML file, because CEL expressions are unreadable as Rust strings.
pub(super) const ADMISSION: &str = include_str!("gateway-admission.yaml");

/// The comment after the SandboxGateways.
pub(super) const NODE_PORT: &str = "# `spec.nodePort` of the SandboxGateways above is the hostPort of the gateway's container, not the \
    nodePort of a Service.\n";

const NAME: &str = "clustermesh-gateway";
/// The namespace of the gateways. It contains nothing else, because it admits privileged pods, for the gateways' init container.
const NAMESPACE: &str = "clustermesh-gateway";
/// The tunnel's UDP port in the pod.
const PORT: u16 = 51820;
/// The tunnel's UDP port on the pod's node.
const HOST_PORT: u16 = 51821;
const REPLICAS: usize = 2;

/// The documents before the admission policy (Namespace, ServiceAccount, roles, SandboxGateways), and those after it (StatefulSet and
/// others).
pub(super) fn documents() -> (Vec<Value>, Vec<Value>) {
    (
        before_admission_policy(),
        vec![service(), budget(), network_policy(), stateful_set()],
    )
}

fn gateway_names() -> Vec<String> {
    (0..REPLICAS).map(|ordinal| format!("{NAME}-{ordinal}")).collect()
}

fn before_admission_policy() -> Vec<Value> {
    let rules = json!([
        {"apiGroups": ["kilo.squat.ai"], "resources": ["sandboxgateways"], "verbs": ["get", "list", "watch"]},
        // A user who adds a replica adds its name to this rule in deploy/gateway.yaml, and creates its SandboxGateway.
        {"apiGroups": ["kilo.squat.ai"], "resources": ["sandboxgateways/status"], "resourceNames": gateway_names(), "verbs": ["patch"]},
    ]);
    let mut out = vec![
        namespace(NAMESPACE, "privileged"),
        service_account(NAME, NAMESPACE),
        role(
            "ClusterRole",
            NAME,
            None,
            &json!([{"apiGroups": ["kilo.squat.ai"], "resources": ["sandboxaccesses"], "verbs": ["get", "list", "watch"]}]),
        ),
        binding(
            "ClusterRoleBinding",
            NAME,
            None,
            ("ClusterRole", NAME),
            (NAME, NAMESPACE),
        ),
        // A RoleBinding to this role in a namespace allows gateways to serve grants of its Services. Other namespaces are not served.
        role(
            "ClusterRole",
            "clustermesh-gateway-reads",
            None,
            &json!([
                {"apiGroups": [""], "resources": ["services"], "verbs": ["get", "list", "watch"]},
                {"apiGroups": ["discovery.k8s.io"], "resources": ["endpointslices"], "verbs": ["get", "list", "watch"]},
            ]),
        ),
        role("Role", NAME, Some(NAMESPACE), &rules),
        binding("RoleBinding", NAME, Some(NAMESPACE), ("Role", NAME), (NAME, NAMESPACE)),
    ];
    out.extend(gateway_names().into_iter().map(|name| {
        json!({
            "apiVersion": "kilo.squat.ai/v1alpha1",
            "kind": "SandboxGateway",
            "metadata": {"name": name, "namespace": NAMESPACE, "labels": labels(NAME)},
            "spec": {"nodePort": HOST_PORT},
        })
    }));
    out
}

/// The headless Service that a StatefulSet requires. No client uses it.
fn service() -> Value {
    json!({
        "apiVersion": "v1",
        "kind": "Service",
        "metadata": {"name": NAME, "namespace": NAMESPACE, "labels": labels(NAME)},
        "spec": {
            "clusterIP": "None",
            "selector": {"app.kubernetes.io/name": NAME},
            "ports": [{"name": "wireguard", "port": PORT, "protocol": "UDP"}],
        },
    })
}

fn budget() -> Value {
    json!({
        "apiVersion": "policy/v1",
        "kind": "PodDisruptionBudget",
        "metadata": {"name": NAME, "namespace": NAMESPACE, "labels": labels(NAME)},
        "spec": {"maxUnavailable": 1, "selector": {"matchLabels": {"app.kubernetes.io/name": NAME}}},
    })
}

/// Limits a compromised gateway, if the CNI enforces NetworkPolicies: it reaches only pods (in every namespace), and TCP ports 443
/// and 6443 at any address, for the API server. Addresses and namespaces differ between clusters, so a user has to narrow the policy to the
/// API server's addresses and to the namespaces that sandboxes may reach.
fn network_policy() -> Value {
    json!({
        "apiVersion": "networking.k8s.io/v1",
        "kind": "NetworkPolicy",
        "metadata": {"name": NAME, "namespace": NAMESPACE, "labels": labels(NAME)},
        "spec": {
            "podSelector": {"matchLabels": {"app.kubernetes.io/name": NAME}},
            "policyTypes": ["Ingress", "Egress"],
            "ingress": [
                {"ports": [{"protocol": "UDP", "port": PORT}]},
                // The admin port (plain http without authentication) is open only to pods of this cluster. The kubelet's probes still
                // work: a NetworkPolicy never blocks traffic from the pod's own node.
                {"from": [{"namespaceSelector": {}}], "ports": [{"protocol": "TCP", "port": AGENT_PORT}]},
            ],
            "egress": [
                {"to": [{"namespaceSelector": {}}]},
                {"ports": [{"protocol": "TCP", "port": 443}, {"protocol": "TCP", "port": 6443}]},
            ],
        },
    })
}

fn field_value(name: &str, path: &str) -> Value {
    json!({"name": name, "valueFrom": {"fieldRef": {"fieldPath": path}}})
}

fn config_map_value(name: &str, key: &str) -> Value {
    json!({"name": name, "valueFrom": {"configMapKeyRef": {"name": NAME, "key": key}}})
}

fn stateful_set() -> Value {
    let mount = |name: &str, path: &str| json!({"name": name, "mountPath": path});
    let memory = |name: &str, limit: &str| json!({"name": name, "emptyDir": {"medium": "Memory", "sizeLimit": limit}});
    let selector = json!({"matchLabels": {"app.kubernetes.io/name": NAME}});
    json!({
        "apiVersion": "apps/v1",
        "kind": "StatefulSet",
        "metadata": {"name": NAME, "namespace": NAMESPACE, "labels": labels(NAME)},
        "spec": {
            "serviceName": NAME,
            "replicas": REPLICAS,
            "podManagementPolicy": "Parallel",
            "selector": selector,
            "updateStrategy": {"type": "RollingUpdate"},
            "template": {
                "metadata": {"labels": labels(NAME)},
                "spec": {
                    "serviceAccountName": NAME,
                    "priorityClassName": "system-cluster-critical",
                    "terminationGracePeriodSeconds": 20,
                    "affinity": {"podAntiAffinity": {"requiredDuringSchedulingIgnoredDuringExecution": [
                        {"topologyKey": "kubernetes.io/hostname", "labelSelector": selector},
                    ]}},
                    // Enables forwarding in the pod. Only this container is privileged, and it exits before the gateway starts.
                    "initContainers": [{
                        "name": "sysctls",
                        "image": AGENT_IMAGE,
                        "imagePullPolicy": "IfNotPresent",
                        "args": ["prepare", "--mode=gateway"],
                        "securityContext": {"privileged": true, "readOnlyRootFilesystem": true},
                    }],
                    "containers": [{
                        "name": "gateway",
                        "image": AGENT_IMAGE,
                        "imagePullPolicy": "IfNotPresent",
                        "args": [
                            "--mode=gateway",
                            "--interface=wg0",
                            "--key-file=/run/clustermesh/gateway/key",
                            "--gateway-cidr=$(GATEWAY_CIDR)",
                            "--endpoint-network=$(ENDPOINT_NETWORK)",
                            format!("--listen=[::]:{AGENT_PORT}"),
                        ],
                        "env": [
                            field_value("POD_NAME", "metadata.name"),
                            field_value("POD_NAMESPACE", "metadata.namespace"),
                            field_value("POD_UID", "metadata.uid"),
                            field_value("POD_IPS", "status.podIPs"),
                            field_value("NODE_IPS", "status.hostIPs"),
                            // Values that differ between clusters. If one is missing, the Pod does not start, and its status shows why.
                            config_map_value("GATEWAY_CIDR", "gateway-cidr"),
                            config_map_value("ENDPOINT_NETWORK", "endpoint-network"),
                        ],
                        "ports": [
                            {"name": "wireguard", "containerPort": PORT, "hostPort": HOST_PORT, "protocol": "UDP"},
                            {"name": "http", "containerPort": AGENT_PORT},
                        ],
                        "livenessProbe": {"httpGet": {"path": "/healthz", "port": "http"}, "periodSeconds": 10, "failureThreshold": 6},
                        "readinessProbe": {"httpGet": {"path": "/readyz", "port": "http"}, "periodSeconds": 1, "failureThreshold": 1},
                        "resources": {"requests": {"cpu": "100m", "memory": "64Mi"}, "limits": {"cpu": "2", "memory": "256Mi"}},
                        "securityContext": {
                            "runAsUser": 0,
                            "allowPrivilegeEscalation": false,
                            "readOnlyRootFilesystem": true,
                            "capabilities": {"drop": ["ALL"], "add": ["NET_ADMIN"]},
                            "seccompProfile": {"type": "RuntimeDefault"},
                        },
                        "volumeMounts": [
                            mount("state", "/run/clustermesh"),
                            mount("wireguard", "/var/run/wireguard"),
                            mount("tun", "/dev/net/tun"),
                        ],
                    }],
                    "volumes": [
                        // The private key, which is deleted with the pod, and the file of the peers' endpoints: 0.1 MB for 1,000
                        // peers, and twice that while the file is replaced.
                        memory("state", "16Mi"),
                        // The agent's lock, and the socket of the userspace backend.
                        memory("wireguard", "1Mi"),
                        // Only for the userspace backend: remove it if the kernels of all nodes have WireGuard.
                        {"name": "tun", "hostPath": {"path": "/dev/net/tun", "type": "CharDevice"}},
                    ],
                },
            },
        },
    })
}
