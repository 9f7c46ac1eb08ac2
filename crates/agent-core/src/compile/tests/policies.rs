//! Tests what PeerPolicies change in the node's firewall, and which of their networks are refused.

use super::*;

#[test]
fn policy_that_allows_no_pods_publishes_no_pods() {
    let mut inputs = worker();
    policy_of(&mut inputs).allow = nets(&["100.66.9.0/24"]);
    assert_eq!(compile(&inputs).firewall.v4.published, nets(&["100.66.9.1/32"]));
}

#[test]
fn pod_cidrs_of_other_nodes_leave_out_anchored_networks() {
    let mut inputs = hub_node();
    assert_eq!(
        compile(&inputs).firewall.v4.pod_cidrs_of_other_nodes,
        nets(&["10.101.1.0/24"])
    );
    policy_of(&mut inputs).anchored = nets(&["10.101.0.0/16"]);
    assert_eq!(compile(&inputs).firewall.v4.pod_cidrs_of_other_nodes, nets(&[]));
}

#[test]
fn anchored_pod_network_publishes_no_pods() {
    let mut inputs = worker();
    let all = compile(&inputs).firewall.v4.published;
    assert_eq!(all, nets(&["10.77.0.0/24", "100.66.9.1/32"]));
    policy_of(&mut inputs).anchored = nets(&["10.77.0.0/16"]);
    assert_eq!(compile(&inputs).firewall.v4.published, nets(&["100.66.9.1/32"]));
}

// threat: policy-claims-own-pods
#[test]
fn policy_network_with_own_pods_is_refused() {
    let mut inputs = worker();
    policy_of(&mut inputs).networks.insert("10.77.0.0/16".parse().unwrap());
    let got = compile(&inputs);
    assert_eq!(
        got.refused
            .iter()
            .map(|r| (r.object.clone(), r.reason))
            .collect::<Vec<_>>(),
        [(Object::PeerPolicy("c1".to_owned()), Reason::OwnPodCIDR)]
    );
    assert_eq!((got.routes, got.firewall), {
        let without = compile(&worker());
        (without.routes, without.firewall)
    });
}

#[test]
fn too_wide_policy_network_is_refused() {
    let with = |networks: &[&str]| {
        let mut inputs = hub_node();
        policy_of(&mut inputs).networks.extend(nets(networks));
        policy_of(&mut inputs).sources.extend(nets(networks));
        compile(&inputs)
    };
    let without = with(&[]);
    let halves = ["0.0.0.0/1", "128.0.0.0/1", "::/1", "8000::/1"];
    for wide in [&halves[..], &["128.0.0.0/7"], &["2000::/6"]] {
        let got = with(wide);
        let mut refused: Vec<String> = got.refused.iter().map(ToString::to_string).collect();
        let mut want: Vec<String> = ["sources", "networks"]
            .iter()
            .flat_map(|field| wide.iter().map(move |net| (field, net)))
            .map(|(field, net)| {
                format!(
                    "PeerPolicy c2: NetworkTooWide: spec.{field} holds {net}, which is wider than /8 (IPv4) or /7 (IPv6); \
                     narrow the source cluster's allowedNetworks"
                )
            })
            .collect();
        refused.sort();
        want.sort();
        assert_eq!(refused, want);
        assert_eq!(
            (got.routes, got.firewall),
            (without.routes.clone(), without.firewall.clone())
        );
    }
    // The widest networks that are accepted.
    let widest = with(&["12.0.0.0/8", "2000::/7"]);
    assert_eq!(widest.refused, []);
    let has_route = |net: &str| {
        widest
            .routes
            .routes
            .iter()
            .any(|route| route.prefix == net.parse().unwrap())
    };
    assert!(has_route("12.0.0.0/8") && has_route("2000::/7"), "{:?}", widest.routes);
}

// threat: hostile-member-root
#[test]
fn policy_that_allows_everything_denies_special_prefixes() {
    let mut inputs = hub_node();
    let everything = Family::BOTH.map(Family::everything);
    policy_of(&mut inputs).allow = everything.into();
    let before = compile(&hub_node()).firewall;
    let after = compile(&inputs).firewall;
    let assert_denies = |before: &BTreeSet<(IpNet, IpNet)>, after: &BTreeSet<(IpNet, IpNet)>, special: &[&str]| {
        let destinations_of = |pairs: &BTreeSet<(IpNet, IpNet)>, source| {
            pairs.iter().filter(|(s, _)| *s == source).map(|(_, to)| *to).collect()
        };
        let sources: BTreeSet<IpNet> = after.iter().map(|(source, _)| *source).collect();
        for source in sources {
            let denied_before: BTreeSet<IpNet> = destinations_of(before, source);
            assert_eq!(
                destinations_of(after, source),
                &denied_before | &nets(special),
                "from {source}"
            );
        }
    };
    let v4 = [
        "0.0.0.0/8",
        "127.0.0.0/8",
        "169.254.0.0/16",
        "224.0.0.0/4",
        "255.255.255.255/32",
    ];
    assert_denies(&before.v4.deny, &after.v4.deny, &v4);
    assert_denies(&before.v6.deny, &after.v6.deny, &["::/127", "fe80::/10", "ff00::/8"]);
    // Each of the two IPv4 sources with each of the five prefixes; the one IPv6 source with each of the three.
    assert_eq!(
        (after.v4.deny.len(), after.v6.deny.len()),
        (before.v4.deny.len() + 10, 3)
    );
}
