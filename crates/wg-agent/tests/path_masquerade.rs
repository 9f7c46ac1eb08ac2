//! The flows of `path_flows` beside the rules that kube-proxy and CNIs write, loaded as they load them: nft, iptables over
//! nftables, and iptables proper. `rules/README.md` says where they were read. Needs root, nft, iptables and ipset.

#[allow(unreachable_pub, reason = "shared between test binaries")]
mod netns;
mod path;

use std::{net::IpAddr, time::Duration};

use netns::{NetNs, wait_for};
use path::{Capture, Family, Mesh, V4, V6, ask, serve, source_of};

/// The same test for both families.
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

/// How rules are loaded.
#[derive(Clone, Copy)]
enum Loader {
    Nft,
    /// iptables-nft or iptables-legacy.
    Iptables(&'static str),
}

/// One program's rules for one node.
struct Rules<'a> {
    f: &'a Family,
    /// The node's pods, and its cluster's.
    pods: &'a str,
    net: &'a str,
    /// A ClusterIP there, its one endpoint, and the range that it is of.
    service: &'a str,
    endpoint: &'a str,
    services: &'a str,
}

impl Rules<'_> {
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

/// Takes away the few rules that stand for a CNI in the other suites, and lets `load` write a real one's, for the node of
/// the member, whose Service is mirrored (its endpoint is a pod of the hub), and for the hub's, whose Service is reached
/// through it as an anchor.
fn mesh(f: &'static Family, load: impl Fn(&NetNs, &Rules<'_>)) -> Mesh {
    let mesh = Mesh::new(f);
    let local = format!("{}/{}", f.local_service, f.host);
    let member = Rules {
        f,
        pods: f.member_pods,
        net: f.member_pod_net,
        service: f.local_service,
        endpoint: f.hub_pod,
        services: &local,
    };
    let hub = Rules {
        f,
        pods: f.hub_pods,
        net: f.hub_pod_net,
        service: f.service,
        endpoint: f.hub2_pod,
        services: f.services,
    };
    for (ns, rules) in [(&mesh.member, &member), (&mesh.hub, &hub)] {
        ns.sh(&format!("nft delete table {} cni", f.ip()));
        load(ns, rules);
    }
    mesh
}

/// The flows, and that the rules would spoil them if ours were not there.
fn flows(f: &'static Family, mesh: &Mesh) {
    serve(&mesh.hub_pod, f.hub_pod, 8080);
    serve(&mesh.hub2_pod, f.hub2_pod, 8080);
    serve(&mesh.member_pod, f.member_pod, 8080);
    // Pods keep their addresses, nodes and what is translated here enter by the node's.
    assert_eq!(source_of(&mesh.member_pod, f.hub_pod, 8080), f.member_pod);
    assert_eq!(source_of(&mesh.hub_pod, f.member_pod, 8080), f.hub_pod);
    assert_eq!(source_of(&mesh.member, f.hub_pod, 8080), f.member_wireguard);
    assert!(mesh.hub_pod.pings(f.member_pod));
    // A Service of the member's own whose endpoint is remote; kube-proxy marks the node's own request for masquerading.
    assert_eq!(source_of(&mesh.member_pod, f.local_service, 80), f.member_pod);
    assert_eq!(source_of(&mesh.member, f.local_service, 80), f.member_wireguard);
    // A remote Service, by its anchor, for which kube-proxy there marks a source that is not of its cluster.
    assert_eq!(source_of(&mesh.member_pod, f.service, 80), f.hub);
    assert_eq!(source_of(&mesh.member, f.service, 80), f.hub);
    // All of it inside the tunnel.
    let capture = Capture::start(
        &mesh.member,
        "eth0",
        &format!("net {} or net {}", f.member_pods, f.hub_pod_net),
    );
    assert_eq!(source_of(&mesh.member_pod, f.local_service, 80), f.member_pod);
    assert_eq!(capture.finish(&mesh.member, f.member, f.switch), Vec::<String>::new());
    // The world beyond is masqueraded as ever.
    serve(&mesh.hub2, f.hub2, 9090);
    assert_eq!(source_of(&mesh.hub_pod, f.hub2, 9090), f.hub);

    mesh.member
        .sh("nft flush chain inet clustermesh nat; nft flush chain inet clustermesh into_tunnel");
    let spoiled = ask(&mesh.member_pod, f.hub_pod, 8080).map_err(|error| error.to_string());
    assert_ne!(
        spoiled,
        Ok(f.member_pod.to_owned()),
        "the rules that were loaded masquerade nothing"
    );
}

fn flows_pass_kube_proxy_and_flannel_nftables_rules(f: &'static Family) {
    let mesh = mesh(f, |ns, rules| {
        rules.load(ns, Loader::Nft, include_str!("rules/kube-proxy.nft"));
        rules.load(ns, Loader::Nft, include_str!("rules/flannel.nft"));
    });
    flows(f, &mesh);
}

fn flows_pass_kube_proxy_and_flannel_iptables_nft_rules(f: &'static Family) {
    let mesh = mesh(f, |ns, rules| load_flannel_iptables(ns, rules, "nft"));
    flows(f, &mesh);
}

fn flows_pass_kube_proxy_and_flannel_iptables_legacy_rules(f: &'static Family) {
    let mesh = mesh(f, |ns, rules| load_flannel_iptables(ns, rules, "legacy"));
    flows(f, &mesh);
}

fn load_flannel_iptables(ns: &NetNs, rules: &Rules<'_>, kind: &'static str) {
    rules.load(ns, Loader::Iptables(kind), include_str!("rules/kube-proxy.iptables"));
    rules.load(ns, Loader::Iptables(kind), include_str!("rules/flannel.iptables"));
}

fn flows_pass_kube_proxy_and_calico_rules(f: &'static Family) {
    let mesh = mesh(f, |ns, rules| {
        let family = if f.n == 6 { "inet6" } else { "inet" };
        for set in ["masq", "all"] {
            let name = format!("cali{}0{set}-ipam-pools", f.n);
            ns.sh(&format!(
                "ipset create {name} hash:net family {family}; ipset add {name} {}",
                rules.net
            ));
        }
        rules.load(ns, Loader::Iptables("nft"), include_str!("rules/kube-proxy.iptables"));
        rules.load(ns, Loader::Iptables("nft"), include_str!("rules/calico.iptables"));
    });
    flows(f, &mesh);
}

/// Pods' packets come up from Cilium's programs with the pod's identity in the mark, of which two bits are where ours are.
fn flows_pass_kube_proxy_and_cilium_legacy_routing_rules(f: &'static Family) {
    let mesh = mesh(f, |ns, rules| {
        rules.load(ns, Loader::Iptables("nft"), include_str!("rules/kube-proxy.iptables"));
        rules.load(ns, Loader::Iptables("nft"), include_str!("rules/cilium.iptables"));
    });
    // What the host sends is marked as the host's, the tunnel's outer packets among it, whose endpoint lies in the mesh.
    let [ours, theirs] =
        [(&mesh.member, f.member), (&mesh.hub, f.hub)].map(|(ns, at)| path::outer_socket(ns, at, 51820));
    wait_for("an outer packet", Duration::from_secs(5), || {
        ours.send_to(b"outer", (f.hub.parse::<IpAddr>().unwrap(), 51820))
            .expect("it may leave");
        theirs.recv_from(&mut [0; 10]).ok()
    });
    serve(&mesh.hub2, f.hub2, 9090);
    serve(&mesh.hub_pod, f.hub_pod, 8080);
    serve(&mesh.member_pod, f.member_pod, 8080);
    // Identities whose bits read, in ours: use the underlay, use the tunnel, both, and neither.
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
            "{identity}: beyond the mesh"
        );
        assert_eq!(
            source_of(&mesh.member_pod, f.local_service, 80),
            f.member_pod,
            "{identity}"
        );
    }
}
