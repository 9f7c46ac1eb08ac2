//! Tests flows through the mesh, as `flows.rs` does, but with the netfilter rules of kube-proxy and CNIs on the nodes. The
//! rules are loaded as these programs load them: with nft, iptables-nft and iptables-legacy. `rules/README.md` gives the
//! source of the rules. Needs root, nft, iptables and ipset.

use std::{net::IpAddr, time::Duration};

use clustermesh_tests::{
    netns::{NetNs, wait_for},
    path::{self, Capture, Family, Mesh, V4, V6, request, serve, source_of},
};

/// Runs tests in both families.
macro_rules! both {
    ($($name:ident)*) => { mod ipv4 { $(#[test] fn $name() { super::$name(&super::V4) })* } mod ipv6 { $(#[test] fn $name() { super::$name(&super::V6) })* } };
}

both! {
    flows_pass_kube_proxy_and_flannel_nftables_rules
    flows_pass_kube_proxy_and_flannel_iptables_nft_rules
    flows_pass_kube_proxy_and_flannel_iptables_legacy_rules
    flows_pass_kube_proxy_and_calico_rules
    flows_pass_kube_proxy_and_cilium_legacy_routing_rules
}

/// The program that loads rules.
#[derive(Clone, Copy)]
enum Loader {
    Nft,
    /// iptables-nft or iptables-legacy.
    Iptables(&'static str),
}

/// The values that replace the placeholders in the rules of one node.
struct Placeholders<'a> {
    /// The IP family of the rules.
    f: &'a Family,
    /// The node's pod CIDR.
    pods: &'a str,
    /// The pod network of the cluster.
    net: &'a str,
    /// A ClusterIP.
    service: &'a str,
    /// The only endpoint of `service`.
    endpoint: &'a str,
    /// The Service network.
    services: &'a str,
}

impl Placeholders<'_> {
    /// Loads the rules in `text` into `ns`.
    fn load(&self, ns: &NetNs, loader: Loader, text: &str) {
        let f = self.f;
        let v6 = f.n == 6;
        let n = f.n.to_string();
        let text = [
            ("{ip}", f.ip()),
            ("{type}", if v6 { "ipv6_addr" } else { "ipv4_addr" }),
            ("{family}", if v6 { "ipv6" } else { "ipv4" }),
            ("{n}", &n),
            ("{pods}", self.pods),
            ("{net}", self.net),
            ("{services}", self.services),
            ("{service}", self.service),
            ("{endpoint}", self.endpoint),
            ("{socket}", &format!("{}:8080", f.url(self.endpoint))),
            ("{multicast}", if v6 { "ff00::/8" } else { "224.0.0.0/4" }),
        ]
        .iter()
        .fold(text.to_owned(), |text, (name, value)| text.replace(name, value));
        let file = tempfile::NamedTempFile::new().unwrap();
        std::fs::write(file.path(), text).unwrap();
        let path = file.path().to_str().unwrap();
        match loader {
            Loader::Nft => ns.run("nft", &["-f", path]),
            Loader::Iptables(kind) => {
                let program = format!("{}tables-{kind}-restore", if v6 { "ip6" } else { "ip" });
                ns.run(&program, &["--noflush", path])
            }
        };
    }
}

/// Creates a mesh in which real rules replace the simple CNI rules of the other tests. `load` loads them on the member's
/// node, where a mirrored Service has a hub pod as endpoint, and on the node `hub`, the anchor of the Service network.
fn mesh(f: &'static Family, load: impl Fn(&NetNs, &Placeholders<'_>)) -> Mesh {
    let mesh = Mesh::new(f);
    let member_services = format!("{}/{}", f.local_service, f.host);
    let member = Placeholders {
        f,
        pods: f.member_pods,
        net: f.member_pod_net,
        service: f.local_service,
        endpoint: f.hub_pod,
        services: &member_services,
    };
    let hub = Placeholders {
        f,
        pods: f.hub_pods,
        net: f.hub_pod_net,
        service: f.service,
        endpoint: f.hub2_pod,
        services: f.services,
    };
    for (ns, placeholders) in [(&mesh.member, &member), (&mesh.hub, &hub)] {
        ns.sh(&format!("nft delete table {} cni", f.ip()));
        load(ns, placeholders);
    }
    mesh
}

/// Checks the flows. Then flushes the agent's chains that translate and check sources, and checks that a request no longer
/// arrives with the pod's address: the loaded rules masquerade it, or it gets no response.
fn check_flows(f: &'static Family, mesh: &Mesh) {
    serve(&mesh.hub_pod, f.hub_pod, 8080);
    serve(&mesh.hub2_pod, f.hub2_pod, 8080);
    serve(&mesh.member_pod, f.member_pod, 8080);
    // Pods keep their addresses. The node's own connections use its WireGuard address.
    assert_eq!(source_of(&mesh.member_pod, f.hub_pod, 8080), f.member_pod);
    assert_eq!(source_of(&mesh.hub_pod, f.member_pod, 8080), f.hub_pod);
    assert_eq!(source_of(&mesh.member, f.hub_pod, 8080), f.member_wireguard);
    assert!(mesh.hub_pod.pings_patiently(f.member_pod));
    // A Service of the member with a remote endpoint. kube-proxy marks connections from the node itself for masquerading.
    assert_eq!(source_of(&mesh.member_pod, f.local_service, 80), f.member_pod);
    assert_eq!(source_of(&mesh.member, f.local_service, 80), f.member_wireguard);
    // A remote Service through its anchor, where kube-proxy masquerades sources outside the anchor's cluster.
    assert_eq!(source_of(&mesh.member_pod, f.service, 80), f.hub);
    assert_eq!(source_of(&mesh.member, f.service, 80), f.hub);
    // The packets of a flow to the remote endpoint are all inside the tunnel.
    let capture = Capture::start(
        &mesh.member,
        "eth0",
        &format!("net {} or net {}", f.member_pods, f.hub_pod_net),
    );
    assert_eq!(source_of(&mesh.member_pod, f.local_service, 80), f.member_pod);
    assert_eq!(capture.finish(&mesh.member, f.member, f.switch), Vec::<String>::new());
    // A pod's connection to another node of its own cluster is still masqueraded.
    serve(&mesh.hub2, f.hub2, 9090);
    assert_eq!(source_of(&mesh.hub_pod, f.hub2, 9090), f.hub);

    mesh.member
        .sh("nft flush chain inet clustermesh nat; nft flush chain inet clustermesh into_tunnel");
    let source = request(&mesh.member_pod, f.hub_pod, 8080).map_err(|error| error.to_string());
    assert_ne!(
        source,
        Ok(f.member_pod.to_owned()),
        "the loaded rules masquerade nothing"
    );
}

fn flows_pass_kube_proxy_and_flannel_nftables_rules(f: &'static Family) {
    let mesh = mesh(f, |ns, placeholders| {
        placeholders.load(ns, Loader::Nft, include_str!("rules/kube-proxy.nft"));
        placeholders.load(ns, Loader::Nft, include_str!("rules/flannel.nft"));
    });
    check_flows(f, &mesh);
}

fn flows_pass_kube_proxy_and_flannel_iptables_nft_rules(f: &'static Family) {
    let mesh = mesh(f, |ns, placeholders| load_flannel_iptables(ns, placeholders, "nft"));
    check_flows(f, &mesh);
}

fn flows_pass_kube_proxy_and_flannel_iptables_legacy_rules(f: &'static Family) {
    let mesh = mesh(f, |ns, placeholders| load_flannel_iptables(ns, placeholders, "legacy"));
    check_flows(f, &mesh);
}

fn load_flannel_iptables(ns: &NetNs, placeholders: &Placeholders<'_>, kind: &'static str) {
    placeholders.load(ns, Loader::Iptables(kind), include_str!("rules/kube-proxy.iptables"));
    placeholders.load(ns, Loader::Iptables(kind), include_str!("rules/flannel.iptables"));
}

fn flows_pass_kube_proxy_and_calico_rules(f: &'static Family) {
    let mesh = mesh(f, |ns, placeholders| {
        let family = if f.n == 6 { "inet6" } else { "inet" };
        for set in ["masq", "all"] {
            let name = format!("cali{}0{set}-ipam-pools", f.n);
            ns.sh(&format!(
                "ipset create {name} hash:net family {family}; ipset add {name} {}",
                placeholders.net
            ));
        }
        placeholders.load(ns, Loader::Iptables("nft"), include_str!("rules/kube-proxy.iptables"));
        placeholders.load(ns, Loader::Iptables("nft"), include_str!("rules/calico.iptables"));
    });
    check_flows(f, &mesh);
}

/// Cilium's programs write a pod's security identity into the mark of the pod's packets. Two of the identity's bits are
/// within the agent's `MARK_MASK`.
fn flows_pass_kube_proxy_and_cilium_legacy_routing_rules(f: &'static Family) {
    let mesh = mesh(f, |ns, placeholders| {
        placeholders.load(ns, Loader::Iptables("nft"), include_str!("rules/kube-proxy.iptables"));
        placeholders.load(ns, Loader::Iptables("nft"), include_str!("rules/cilium.iptables"));
    });
    // Cilium marks packets of the host, and so the tunnel's outer packets. They must still leave on the underlay, although
    // the hub node's address is in a mesh network.
    let [ours, theirs] =
        [(&mesh.member, f.member), (&mesh.hub, f.hub)].map(|(ns, at)| path::outer_socket(ns, at, 51820));
    wait_for("an outer packet", Duration::from_secs(60), || {
        ours.send_to(b"outer", (f.hub.parse::<IpAddr>().unwrap(), 51820))
            .expect("send an outer packet");
        theirs.recv_from(&mut [0; 10]).ok()
    });
    serve(&mesh.hub2, f.hub2, 9090);
    serve(&mesh.hub_pod, f.hub_pod, 8080);
    serve(&mesh.member_pod, f.member_pod, 8080);
    // Identities whose two bits are MARK_UNDERLAY, MARK_TUNNEL, both, and neither.
    for identity in ["0x12140f00", "0x12240f00", "0x12340f00", "0x12040f00"] {
        for ns in [&mesh.member, &mesh.hub] {
            ns.sh(&format!(
                "nft 'table netdev cilium {{ }}; delete table netdev cilium; \
                 table netdev cilium {{ chain lxc {{ type filter hook ingress device cni0 priority 0; meta mark set {identity}; }}; }}'"
            ));
        }
        assert_eq!(source_of(&mesh.member_pod, f.hub_pod, 8080), f.member_pod, "{identity}");
        assert_eq!(source_of(&mesh.hub_pod, f.member_pod, 8080), f.hub_pod, "{identity}");
        assert_eq!(
            source_of(&mesh.hub_pod, f.hub2, 9090),
            f.hub,
            "{identity}: to a node of the pod's own cluster"
        );
        assert_eq!(
            source_of(&mesh.member_pod, f.local_service, 80),
            f.member_pod,
            "{identity}"
        );
    }
}
