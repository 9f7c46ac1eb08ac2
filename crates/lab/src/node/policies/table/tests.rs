use std::net::{IpAddr, Ipv4Addr};

use serde_json::json;

use super::*;

const NODE: IpAddr = IpAddr::V4(Ipv4Addr::new(172, 30, 1, 11));

struct TestCluster {
    policies: Objects<NetworkPolicy>,
    pods: Objects<Pod>,
    namespaces: Objects<Namespace>,
}

impl TestCluster {
    fn new(pods: &[serde_json::Value], policies: &[serde_json::Value]) -> Self {
        let namespaces = ["tenant", "kube-system"].map(|name| {
            let labels = json!({"kubernetes.io/metadata.name": name});
            json!({"metadata": {"name": name, "labels": labels}})
        });
        Self {
            policies: objects(policies),
            pods: objects(pods),
            namespaces: objects(&namespaces),
        }
    }

    fn render(&self) -> String {
        let Self {
            policies,
            pods,
            namespaces,
        } = self;
        render(
            NODE,
            &ClusterObjects {
                policies,
                pods,
                namespaces,
            },
        )
    }
}

fn objects<K: kube::Resource + serde::de::DeserializeOwned>(values: &[serde_json::Value]) -> Objects<K> {
    let objects = values
        .iter()
        .map(|value| serde_json::from_value::<K>(value.clone()).unwrap());
    objects
        .map(|object| {
            let meta = object.meta();
            let key = (meta.namespace.clone().unwrap_or_default(), meta.name.clone().unwrap());
            (key, object)
        })
        .collect()
}

fn pod(namespace: &str, name: &str, labels: serde_json::Value, ip: &str, host: &str) -> serde_json::Value {
    json!({
        "metadata": {"namespace": namespace, "name": name, "labels": labels},
        "spec": {"containers": [{"name": "one", "ports": [{"name": "web", "containerPort": 8080}]}]},
        "status": {"phase": "Running", "hostIP": host, "podIP": ip, "podIPs": [{"ip": ip}]},
    })
}

fn policy(spec: serde_json::Value) -> serde_json::Value {
    json!({"metadata": {"namespace": "tenant", "name": "first"}, "spec": spec})
}

fn pods() -> Vec<serde_json::Value> {
    vec![
        pod(
            "tenant",
            "vm",
            json!({"kubevirt.io": "virt-launcher"}),
            "10.10.1.250",
            "172.30.1.11",
        ),
        pod(
            "tenant",
            "vm-elsewhere",
            json!({"kubevirt.io": "virt-launcher"}),
            "10.10.2.250",
            "172.30.1.12",
        ),
        pod(
            "kube-system",
            "dns",
            json!({"k8s-app": "kube-dns"}),
            "10.10.1.2",
            "172.30.1.11",
        ),
        pod(
            "kube-system",
            "other",
            json!({"k8s-app": "other"}),
            "10.10.1.3",
            "172.30.1.11",
        ),
    ]
}

#[test]
fn chains_of_selected_pod_drop_all_but_allowed_traffic() {
    let spec = json!({
        "podSelector": {"matchLabels": {"kubevirt.io": "virt-launcher"}},
        "policyTypes": ["Ingress", "Egress"],
        "ingress": [{"from": [{"podSelector": {}}], "ports": [{"port": "web"}, {"port": "no-such"}]}],
        "egress": [
            {"to": [{"ipBlock": {"cidr": "172.30.1.0/24", "except": ["172.30.1.1/32"]}}, {"ipBlock": {"cidr": "fd00::/8"}}],
             "ports": [{"protocol": "UDP", "port": 51820, "endPort": 51821}]},
            {"to": [{"namespaceSelector": {"matchLabels": {"kubernetes.io/metadata.name": "kube-system"}},
                     "podSelector": {"matchExpressions": [{"key": "k8s-app", "operator": "In", "values": ["kube-dns"]}]}}],
             "ports": [{"protocol": "UDP", "port": 53}, {"protocol": "TCP"}]},
        ],
    });
    // A chain's name contains the index (from 0) of its pod among all pods with their own address that have not terminated, sorted
    // by namespace and name: `vm` has the index 2.
    let want = "table inet policies
delete table inet policies
table inet policies {
 chain egress_2_ip {
  ip daddr 172.30.1.0/24 ip daddr != 172.30.1.1/32 udp dport 51820-51821 return
  ip daddr 10.10.1.2 udp dport 53 return
  ip daddr 10.10.1.2 meta l4proto tcp return
  counter drop
 }
 chain ingress_2_ip {
  ip saddr 10.10.1.250 tcp dport 8080 return
  ip saddr 10.10.2.250 tcp dport 8080 return
  counter drop
 }
 chain egress {
  ip saddr 10.10.1.250 jump egress_2_ip
 }
 chain ingress {
  ip daddr 10.10.1.250 jump ingress_2_ip
 }
 chain forward {
  type filter hook forward priority filter; policy accept;
  ct state established,related accept
  jump egress
  jump ingress
 }
 chain input {
  type filter hook input priority filter; policy accept;
  ct state established,related accept
  jump egress
 }
}
";
    assert_eq!(TestCluster::new(&pods(), &[policy(spec)]).render(), want);
}

#[test]
fn egress_policies_of_pod_add_up_and_leave_ingress_open() {
    let egress = |cidr: &str| json!({"podSelector": {}, "policyTypes": ["Egress"], "egress": [{"to": [{"ipBlock": {"cidr": cidr}}]}]});
    let mut second = policy(egress("10.0.0.2/32"));
    second["metadata"]["name"] = "second".into();
    let rendered = TestCluster::new(&pods(), &[policy(egress("10.0.0.1/32")), second]).render();
    let chains = " chain egress_2_ip {\n  ip daddr 10.0.0.1/32 return\n  ip daddr 10.0.0.2/32 return\n  counter drop\n }\n \
                  chain egress {\n  ip saddr 10.10.1.250 jump egress_2_ip\n }\n chain ingress {\n }\n";
    assert!(rendered.contains(chains), "{rendered}");
}

#[test]
fn policy_restricts_only_its_given_or_default_types() {
    let has_chains = |spec: serde_json::Value| {
        let rendered = TestCluster::new(&pods(), &[policy(spec)]).render();
        ["egress_2_ip", "ingress_2_ip"].map(|chain| rendered.contains(&format!("chain {chain}")))
    };
    assert_eq!(has_chains(json!({"podSelector": {}})), [false, true]);
    assert_eq!(has_chains(json!({"podSelector": {}, "egress": [{}]})), [true, true]);
    assert_eq!(
        has_chains(json!({"podSelector": {}, "policyTypes": ["Egress"]})),
        [true, false]
    );
}

#[test]
fn only_running_local_pod_with_own_address_gets_a_chain() {
    let mut all = pods();
    let mut on_host = pod("tenant", "host", json!({}), "172.30.1.11", "172.30.1.11");
    on_host["spec"]["hostNetwork"] = true.into();
    let mut ended = pod("tenant", "over", json!({}), "10.10.1.9", "172.30.1.11");
    ended["status"]["phase"] = "Succeeded".into();
    all.extend([on_host, ended]);
    let rendered = TestCluster::new(&all, &[policy(json!({"podSelector": {}}))]).render();
    let chains: Vec<&str> = rendered
        .lines()
        .filter(|line| line.contains(" jump ingress_"))
        .collect();
    assert_eq!(chains, ["  ip daddr 10.10.1.250 jump ingress_2_ip"]);
}
