//! Property tests over arbitrary objects, including hostile ones.

use std::net::SocketAddr;

use proptest::{collection::vec, option, prelude::*, sample::select};

use super::*;
use crate::prefixes::{host, overlap};

mod kernel;

use kernel::kernel_with_table;

/// The first four do not overlap one another.
const NETWORKS: [&str; 8] = [
    "100.80.1.0/24",
    "100.80.2.0/24",
    "fd80:1::/64",
    "fd80:2::/64",
    "100.80.1.128/25",
    "100.0.0.0/8",
    "10.244.0.0/24",
    "0.0.0.0/0",
];
const ADDRESSES: [&str; 5] = ["100.80.1.1", "100.80.1.129", "100.80.2.1", "fd80:1::1", "192.0.2.1"];
/// A gateway leaves out the last two: 192.0.2.1 lies outside the endpoint networks of [`settings`], 10.244.0.9 is reserved.
const ENDPOINTS: [&str; 6] = [
    "10.244.1.5",
    "10.244.1.6",
    "fd10:244::5",
    "fd10:244::6",
    "192.0.2.1",
    "10.244.0.9",
];

/// A value of `good`, or the error of a value that does not parse.
fn sometimes_invalid<T: Clone + fmt::Debug + 'static>(
    good: impl Strategy<Value = T> + 'static,
) -> BoxedStrategy<Result<T, String>> {
    prop_oneof![9 => good.prop_map(Ok), 1 => Just(Err("wrong".to_owned()))].boxed()
}

fn protocol() -> impl Strategy<Value = Protocol> {
    prop_oneof![6 => Just(Protocol::Tcp), 3 => Just(Protocol::Udp), 1 => Just(Protocol::Sctp)]
}

fn network() -> impl Strategy<Value = IpNet> {
    prop_oneof![4 => select(&NETWORKS[..4]), 1 => select(&NETWORKS[..])].prop_map(net)
}

fn any_node() -> impl Strategy<Value = Node> {
    let key = sometimes_invalid((1u8..4).prop_map(key));
    let addresses = vec(sometimes_invalid(select(&ADDRESSES[..]).prop_map(ip)), 0..3);
    (key, addresses).prop_map(|(public_key, addresses)| Node { public_key, addresses })
}

/// Arbitrary texts, including some that would inject commands if a script contained them.
fn any_text() -> impl Strategy<Value = String> {
    let hostile = [
        "\"; flush ruleset; \"",
        "}\nflush ruleset\n",
        "x\" }\nadd element inet clustermesh sandboxes4 { 0.0.0.0/0 : 0x1 }",
        "\r",
        "\\",
    ];
    prop_oneof![".{0,20}", any::<String>(), select(hostile.map(str::to_owned).to_vec())]
}

/// Objects whose names, ports and messages are from `texts`.
fn any_inputs(texts: Vec<String>) -> impl Strategy<Value = Inputs> {
    let namespace = texts[0].clone();
    let name = move |name: String| ObjectName {
        namespace: namespace.clone(),
        name,
    };
    let all_ports: BTreeSet<(Protocol, String)> = [Protocol::Tcp, Protocol::Udp, Protocol::Sctp]
        .into_iter()
        .flat_map(|protocol| texts.iter().map(move |text| (protocol, text.clone())))
        .collect();
    let text = {
        let texts = texts.clone();
        move || select(texts.clone())
    };
    let granted_name = text().prop_map(name.clone());
    let granted =
        (granted_name, text(), protocol(), 1u16..3).prop_map(|(service, port, protocol, gateway_port)| GrantSpec {
            service,
            port,
            protocol,
            gateway_port,
        });
    let access = (
        (text(), text(), text(), 0i64..3),
        vec(sometimes_invalid(network()), 1..4),
        vec(any_node(), 0..3),
        vec(granted, 0..5),
        option::of(0u32..3),
    );
    let access = access.prop_map(
        |((name, identity, sandbox, created), networks, nodes, grants, rate)| Access {
            name,
            created,
            identity,
            sandbox,
            networks,
            nodes,
            grants,
            new_connections: rate,
        },
    );
    let endpoint = (
        protocol(),
        text(),
        select(&ENDPOINTS[..]),
        select(vec![53u16, 5432, 10250]),
        any::<[bool; 2]>(),
    );
    let endpoint = endpoint.prop_map(|(protocol, port_name, address, port, [ready, serving])| Endpoint {
        protocol,
        port_name,
        address: ip(address),
        port,
        ready,
        serving,
    });
    let ports = prop_oneof![4 => Just(all_ports), 1 => Just(BTreeSet::new())];
    let flag = || prop_oneof![9 => Just(false), 1 => Just(true)];
    let seen = (ports, vec(endpoint, 0..8), [flag(), flag(), flag()], any::<bool>());
    let seen = seen.prop_map(
        |(ports, endpoints, [selectorless, is_external_name, is_mirror], is_sticky)| {
            Service::Observed(ObservedService {
                has_selector: !selectorless,
                is_external_name,
                is_mirror,
                is_sticky,
                ports,
                endpoints: endpoints.into_iter().collect(),
            })
        },
    );
    let service = prop_oneof![
        8 => seen,
        1 => Just(Service::Absent),
        1 => text().prop_map(Service::Unknown),
    ];
    let services = vec(service, texts.len()).prop_map(move |services| {
        let names = texts.iter().cloned().map(&name);
        names.zip(services).collect::<BTreeMap<_, _>>()
    });
    let connections = || prop_oneof![4 => Just(0u32), 1 => Just(4000)];
    (vec(access, 0..4), services, 0u32..3, connections(), connections()).prop_map(
        |(accesses, services, new_connections, sandbox_connections, endpoint_connections)| Inputs {
            settings: Settings {
                new_connections,
                sandbox_connections,
                endpoint_connections,
                ..settings()
            },
            accesses,
            services,
        },
    )
}

fn two_texts() -> Vec<String> {
    ["x", "y"].map(str::to_owned).to_vec()
}

/// Two inputs. Each has its own settings; either the SandboxAccesses or the Services may be the same.
fn two_inputs() -> impl Strategy<Value = (Inputs, Inputs)> {
    let keep = select(vec![[true, false], [false, true], [false, false]]);
    (any_inputs(two_texts()), any_inputs(two_texts()), keep).prop_map(|(old, mut new, [accesses, services])| {
        if accesses {
            new.accesses.clone_from(&old.accesses);
        }
        if services {
            new.services.clone_from(&old.services);
        }
        (old, new)
    })
}

/// A connection that a table allows: source network, protocol, gateway port, grant, endpoint; true = it may be new.
type Allowed = (IpNet, Protocol, u16, GrantId, SocketAddr, bool);

fn allowed_connections(table: &Table) -> BTreeSet<Allowed> {
    let mut out = BTreeSet::new();
    for (network, sandbox) in &table.sandboxes {
        for ((_, protocol, port), grant) in table.grants.iter().filter(|((of, ..), _)| of == sandbox) {
            let Balancer { v4, v6, .. } = &grant.balancer;
            let balanced = v4.iter().chain(v6).map(|socket| (socket, true));
            for (socket, may_be_new) in balanced.chain(grant.allowed_endpoints.iter().map(|socket| (socket, false))) {
                out.insert((*network, *protocol, *port, grant.id, *socket, may_be_new));
            }
        }
    }
    out
}

proptest! {
    #[test]
    fn steps_reach_the_table_and_allow_nothing_else((old, new) in two_inputs(), limit in 1usize..8) {
        let (old, new) = (compile(&old).table, compile(&new).table);
        let known: BTreeSet<Allowed> = allowed_connections(&old).union(&allowed_connections(&new)).copied().collect();
        let grants = |table: &Table| -> BTreeSet<_> { table.grants.iter().map(|(key, grant)| (*key, grant.id)).collect() };
        let mut now = old.clone();
        for _ in 0..1000 {
            if now == new {
                break;
            }
            let next = Table::step_within(limit, Some(&now), &new);
            prop_assert_ne!(&next, &now);
            prop_assert!(allowed_connections(&next).is_subset(&known), "{:?}", allowed_connections(&next).difference(&known));
            // No grant is added before every obsolete grant is removed.
            let added = !grants(&next).is_subset(&grants(&old));
            prop_assert!(!added || grants(&next).is_subset(&grants(&new)));
            if now.parameters == next.parameters {
                let mut kernel = kernel_with_table(&now).map_err(TestCaseError::fail)?;
                let script = update(Some(&now), &next);
                kernel.apply(&script.unwrap_or_default()).map_err(TestCaseError::fail)?;
                prop_assert_eq!(Ok(kernel), kernel_with_table(&next));
            }
            now = next;
        }
        prop_assert_eq!(now, new);
    }

    #[test]
    fn update_leads_to_the_same_table_as_a_whole_write((old, new) in two_inputs()) {
        let (old, new) = (compile(&old).table, compile(&new).table);
        let want = kernel_with_table(&new);
        let script = update(Some(&old), &new);
        if old.parameters == new.parameters {
            let mut kernel = kernel_with_table(&old).map_err(TestCaseError::fail)?;
            kernel.apply(&script.unwrap_or_default()).map_err(TestCaseError::fail)?;
            prop_assert_eq!(Ok(kernel), want);
        } else {
            prop_assert_eq!(script, update(None, &new));
        }
        prop_assert_eq!(update(Some(&new), &new), None);
    }

    #[test]
    fn text_from_objects_does_not_change_the_rules(
        inputs in vec(any_text(), 1..3).prop_flat_map(any_inputs),
    ) {
        let table = compile(&inputs).table;
        // The rules are the same as those of a gateway without any object.
        let empty = Inputs { accesses: Vec::new(), services: BTreeMap::new(), ..inputs };
        prop_assert_eq!(&table.parameters, &compile(&empty).table.parameters);
        kernel_with_table(&table).map_err(TestCaseError::fail)?;
    }

    #[test]
    fn result_has_no_conflict_and_no_forbidden_endpoint(inputs in any_inputs(two_texts())) {
        let Compiled { peers, routes, table, served, .. } = compile(&inputs);
        prop_assert_eq!(&routes, &table.sandboxes.keys().copied().collect());
        prop_assert!(served.iter().all(|name| inputs.accesses.iter().any(|access| access.name == *name)));
        let networks: Vec<&IpNet> = routes.iter().collect();
        for (at, network) in networks.iter().enumerate() {
            prop_assert!(networks[at + 1..].iter().all(|other| !overlap(network, other)), "{networks:?}");
        }
        let allowed_ips: Vec<&IpNet> = peers.values().flat_map(|peer| &peer.allowed_ips).collect();
        prop_assert_eq!(allowed_ips.iter().collect::<BTreeSet<_>>().len(), allowed_ips.len());
        prop_assert!(allowed_ips.iter().all(|ip| routes.iter().any(|network| network.contains(*ip))));
        let forbidden = ["192.0.2.1", "10.244.0.9"].map(|text| host(ip(text)));
        for ((_, protocol, _), grant) in &table.grants {
            prop_assert!(*protocol != Protocol::Sctp);
            let Balancer { v4, v6, .. } = &grant.balancer;
            prop_assert!(v4.iter().all(SocketAddr::is_ipv4) && v6.iter().all(SocketAddr::is_ipv6));
            prop_assert!(v4.iter().chain(v6).all(|socket| grant.allowed_endpoints.contains(socket)));
            // 10250 is the port of the kubelet.
            let is_permitted = |socket: &SocketAddr| !forbidden.contains(&host(socket.ip())) && socket.port() != 10250;
            prop_assert!(grant.allowed_endpoints.iter().all(is_permitted));
        }
    }
}
