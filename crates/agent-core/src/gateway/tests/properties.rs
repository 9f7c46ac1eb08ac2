//! Property tests over arbitrary objects, including hostile ones.

use std::net::SocketAddr;

use proptest::{collection::vec, option, prelude::*, sample::select};

use super::*;
use crate::prefixes::{host, overlap};

/// A part of a line whose value comes from an object.
#[derive(Debug, Clone, Copy)]
enum Part {
    Mark,
    Protocol,
    Port,
    Address,
    Network,
    Chain,
    Limit,
    Socket,
}

fn is_number(text: &str) -> bool {
    text.len() == 8 && text.bytes().all(|byte| matches!(byte, b'0'..=b'9' | b'a'..=b'f'))
}

fn is_chain(text: &str) -> bool {
    let text = text.strip_suffix("-by-address").unwrap_or(text);
    let count = ["choose4-", "choose6-"]
        .iter()
        .find_map(|start| text.strip_prefix(start));
    count.is_some_and(|count| count.parse::<usize>().is_ok_and(|count| count > 0))
}

fn is_limit(text: &str) -> bool {
    text.strip_prefix("sandbox-").is_some_and(is_number)
}

impl Part {
    fn is(self, text: &str) -> bool {
        match self {
            Self::Mark => text.strip_prefix("0x").is_some_and(is_number),
            Self::Protocol => matches!(text, "tcp" | "udp"),
            Self::Port => text.parse::<u16>().is_ok(),
            Self::Address => text.parse::<IpAddr>().is_ok(),
            Self::Network => text.parse::<IpNet>().is_ok(),
            Self::Chain => text.strip_prefix("goto ").is_some_and(is_chain),
            Self::Socket => is_key(&[Self::Address, Self::Port], text),
            Self::Limit => text
                .strip_prefix('"')
                .and_then(|text| text.strip_suffix('"'))
                .is_some_and(is_limit),
        }
    }
}

/// The form of a set's elements: the parts of the key, and the data of a map.
fn form(set: &str) -> Option<(&'static [Part], Option<Part>)> {
    use Part::*;
    Some(match set {
        "limits" => (&[Mark], Some(Limit)),
        "services4" | "services6" => (&[Mark], Some(Chain)),
        "backends4" | "backends6" => (&[Mark, Mark], Some(Socket)),
        "sandboxes4" | "sandboxes6" => (&[Network], Some(Mark)),
        "grants" => (&[Mark, Protocol, Port], Some(Mark)),
        "open" => (&[Mark, Protocol, Port, Mark], None),
        "endpoints4" | "endpoints6" => (&[Mark, Address, Port], None),
        "hosts4" | "hosts6" => (&[Mark, Address], None),
        _ => return None,
    })
}

/// A line of a script after those of `render::frame`.
#[derive(Debug, Clone, PartialEq, Eq)]
enum Line<'a> {
    AddElement(&'a str, &'a str, Option<&'a str>),
    DeleteElement(&'a str, &'a str),
    AddChain(&'a str),
    FlushChain(&'a str),
    DeleteChain(&'a str),
    AddRule(&'a str, &'a str),
    AddLimit(&'a str, &'a str),
    DeleteLimit(&'a str),
}

/// Parses `SET { KEY : DATA, .. }`, or without data.
fn elements(text: &str, with_data: bool) -> Option<Vec<(&str, &str, Option<&str>)>> {
    let (set, rest) = text.strip_suffix(" }")?.split_once(" { ")?;
    let (parts, data_part) = form(set)?;
    let element = |text| {
        let (key, data) = match data_part.filter(|_| with_data) {
            Some(part) => {
                let (key, data): (&str, _) = str::split_once(text, " : ")?;
                (key, Some(data).filter(|data| part.is(data))?)
            }
            None => return is_key(parts, text).then_some((set, text, None)),
        };
        is_key(parts, key).then_some((set, key, Some(data)))
    };
    rest.split(", ").map(element).collect()
}

fn is_key(parts: &[Part], key: &str) -> bool {
    let texts: Vec<&str> = key.split(" . ").collect();
    texts.len() == parts.len() && parts.iter().zip(texts).all(|(part, text)| part.is(text))
}

fn is_rule(chain: &str, rule: &str) -> Option<bool> {
    let sticky = chain.ends_with("-by-address");
    let (family, count) = chain
        .trim_end_matches("-by-address")
        .strip_prefix("choose")?
        .split_once('-')?;
    let ip = if family == "4" { "ip" } else { "ip6" };
    let choice = if sticky {
        format!("jhash {ip} saddr mod {count} seed 0x1")
    } else {
        format!("numgen random mod {count}")
    };
    let rules = [
        format!("meta mark set {choice} comment \"number of the endpoint\""),
        format!(
            "meta l4proto {{ tcp, udp }} dnat {ip} to ct mark . meta mark map @backends{family} comment \"translate to that endpoint\""
        ),
    ];
    Some(rules.iter().any(|known| known == rule))
}

fn is_rate(rate: &str) -> Option<bool> {
    let rest = rate.strip_prefix("rate over ")?.strip_suffix(" packets")?;
    let (rate, burst) = rest.split_once("/second burst ")?;
    Some(rate.parse::<u32>().is_ok() && burst.parse::<u32>().is_ok())
}

impl<'a> Line<'a> {
    fn parse(line: &'a str) -> Option<Vec<Self>> {
        let (verb, rest) = line.split_once(" inet clustermesh ")?;
        let one = match verb {
            "add element" => {
                let elements = elements(rest, true)?.into_iter();
                return Some(
                    elements
                        .map(|(set, key, data)| Self::AddElement(set, key, data))
                        .collect(),
                );
            }
            "delete element" => {
                let elements = elements(rest, false)?.into_iter();
                return Some(elements.map(|(set, key, _)| Self::DeleteElement(set, key)).collect());
            }
            "add chain" if is_chain(rest) => Self::AddChain(rest),
            "flush chain" if is_chain(rest) => Self::FlushChain(rest),
            "delete chain" if is_chain(rest) => Self::DeleteChain(rest),
            "add rule" => {
                let (chain, rule) = rest.split_once(' ')?;
                (is_chain(chain) && is_rule(chain, rule)?).then_some(Self::AddRule(chain, rule))?
            }
            "add limit" => {
                let (limit, rate) = rest.split_once(' ')?;
                (is_limit(limit) && is_rate(rate)?).then_some(Self::AddLimit(limit, rate))?
            }
            "delete limit" if is_limit(rest) => Self::DeleteLimit(rest),
            _ => return None,
        };
        Some(vec![one])
    }
}

/// A model of the kernel's table, without the rules of `render::frame`.
#[derive(Debug, Clone, Default, PartialEq, Eq)]
struct Kernel {
    elements: BTreeMap<(String, String), Option<String>>,
    chains: BTreeMap<String, Vec<String>>,
    limits: BTreeMap<String, String>,
}

impl Kernel {
    /// Applies a script at least as strictly as the kernel does. A part that is added must not exist, and the parts that it refers to
    /// must. A part that is deleted must exist, and no other may refer to it.
    fn apply(&mut self, script: &str) -> Result<(), String> {
        for line in script.lines() {
            let parsed = Line::parse(line).ok_or_else(|| format!("unknown form: {line:?}"))?;
            if !parsed.into_iter().all(|one| self.line(one)) {
                return Err(format!("refused: {line} of\n{script}"));
            }
        }
        self.check_backends()
    }

    /// Each chain finds an endpoint for every number that it may draw, and there are no other endpoints.
    fn check_backends(&self) -> Result<(), String> {
        let mut backends = BTreeSet::new();
        for ((set, key), data) in &self.elements {
            let Some(family) = set.strip_prefix("services") else {
                continue;
            };
            let chain = data
                .as_ref()
                .and_then(|data| data.strip_prefix("goto "))
                .ok_or("no chain")?;
            let rest = chain
                .strip_prefix("choose")
                .and_then(|rest| rest.strip_prefix(family))
                .ok_or(chain)?;
            let count = rest.trim_start_matches('-').trim_end_matches("-by-address");
            for at in 0..count.parse::<u32>().map_err(|error| error.to_string())? {
                backends.insert((format!("backends{family}"), format!("{key} . {at:#010x}")));
            }
        }
        let there = self.elements.keys().filter(|(set, _)| set.starts_with("backends"));
        let there: BTreeSet<_> = there.cloned().collect();
        if there == backends {
            Ok(())
        } else {
            Err(format!("{there:?} for {backends:?}"))
        }
    }

    fn is_referred_to(&self, data: &str) -> bool {
        self.elements.values().any(|other| other.as_deref() == Some(data))
    }

    fn line(&mut self, line: Line<'_>) -> bool {
        match line {
            Line::AddElement(set, key, data) => {
                self.is_free(set, key)
                    && self.has_references(set, key, data)
                    && self
                        .elements
                        .insert((set.to_owned(), key.to_owned()), data.map(str::to_owned))
                        .is_none()
            }
            Line::DeleteElement(set, key) => {
                let removed = self.elements.remove(&(set.to_owned(), key.to_owned())).is_some();
                let used = match set {
                    "open" => self.elements.iter().any(|((set, place), data)| {
                        set == "grants" && data.as_ref().is_some_and(|id| format!("{place} . {id}") == key)
                    }),
                    _ => false,
                };
                removed && !used
            }
            Line::AddChain(chain) => self.chains.insert(chain.to_owned(), Vec::new()).is_none(),
            Line::FlushChain(chain) => self.chains.get_mut(chain).map(Vec::clear).is_some(),
            Line::AddRule(chain, rule) => self
                .chains
                .get_mut(chain)
                .map(|rules| rules.push(rule.to_owned()))
                .is_some(),
            Line::DeleteChain(chain) => {
                let empty = self.chains.remove(chain).is_some_and(|rules| rules.is_empty());
                empty && !self.is_referred_to(&format!("goto {chain}"))
            }
            Line::AddLimit(limit, rate) => self.limits.insert(limit.to_owned(), rate.to_owned()).is_none(),
            Line::DeleteLimit(limit) => {
                self.limits.remove(limit).is_some() && !self.is_referred_to(&format!("\"{limit}\""))
            }
        }
    }

    /// No element of an interval map overlaps another.
    fn is_free(&self, set: &str, key: &str) -> bool {
        let Ok(network) = key.parse::<IpNet>() else { return true };
        let others = self.elements.keys().filter(|(other, _)| other == set);
        let family = if network.addr().is_ipv4() {
            "sandboxes4"
        } else {
            "sandboxes6"
        };
        set == family && others.map(|(_, key)| net(key)).all(|other| !overlap(&other, &network))
    }

    /// Whether what an element refers to exists: its chain or limit, or for a grant the element of `open` that lets its packets in.
    fn has_references(&self, set: &str, key: &str, data: Option<&str>) -> bool {
        let has = |set: &str, key: String| self.elements.contains_key(&(set.to_owned(), key));
        let Some(data) = data else { return true };
        match set {
            "services4" | "services6" => data
                .strip_prefix("goto ")
                .is_some_and(|chain| self.chains.contains_key(chain)),
            "limits" => self.limits.contains_key(data.trim_matches('"')),
            "grants" => has("open", format!("{key} . {data}")),
            _ => true,
        }
    }
}

/// The model after the whole table was written.
fn written(table: &Table) -> Result<Kernel, String> {
    let script = update(None, table).unwrap_or_default();
    let lines = script
        .strip_prefix(&render::frame(&table.frame))
        .ok_or("the rules do not come first")?;
    let mut kernel = Kernel::default();
    kernel.apply(lines)?;
    Ok(kernel)
}

/// The first four overlap no other.
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
/// The last two are forbidden.
const ENDPOINTS: [&str; 6] = [
    "10.244.1.5",
    "10.244.1.6",
    "fd10:244::5",
    "fd10:244::6",
    "192.0.2.1",
    "10.244.0.9",
];

fn bad<T: Clone + fmt::Debug + 'static>(good: impl Strategy<Value = T> + 'static) -> BoxedStrategy<Result<T, String>> {
    prop_oneof![9 => good.prop_map(Ok), 1 => Just(Err("wrong".to_owned()))].boxed()
}

fn protocol() -> impl Strategy<Value = Protocol> {
    prop_oneof![6 => Just(Protocol::Tcp), 3 => Just(Protocol::Udp), 1 => Just(Protocol::Sctp)]
}

fn network() -> impl Strategy<Value = IpNet> {
    prop_oneof![4 => select(&NETWORKS[..4]), 1 => select(&NETWORKS[..])].prop_map(net)
}

fn any_node() -> impl Strategy<Value = Node> {
    let key = bad((1u8..4).prop_map(key));
    let addresses = vec(bad(select(&ADDRESSES[..]).prop_map(ip)), 0..3);
    (key, addresses).prop_map(|(public_key, addresses)| Node { public_key, addresses })
}

/// Arbitrary texts, among them some that could break out of a word of the script.
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
        (granted_name, text(), protocol(), 1u16..3).prop_map(|(service, port, protocol, gateway_port)| Granted {
            service,
            port,
            protocol,
            gateway_port,
        });
    let access = (
        (text(), text(), text(), 0i64..3),
        vec(bad(network()), 1..4),
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
    let seen = seen.prop_map(|(ports, endpoints, [selector, external_name, mirror], sticky)| {
        Service::Seen(Facts {
            selector: !selector,
            external_name,
            mirror,
            sticky,
            ports,
            endpoints: endpoints.into_iter().collect(),
        })
    });
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

fn few() -> Vec<String> {
    ["x", "y"].map(str::to_owned).to_vec()
}

/// Two inputs. They differ in all objects, or only in SandboxAccesses, or only in Services.
fn two_inputs() -> impl Strategy<Value = (Inputs, Inputs)> {
    let keep = select(vec![[true, false], [false, true], [false, false]]);
    (any_inputs(few()), any_inputs(few()), keep).prop_map(|(old, mut new, [accesses, services])| {
        if accesses {
            new.accesses.clone_from(&old.accesses);
        }
        if services {
            new.services.clone_from(&old.services);
        }
        (old, new)
    })
}

/// A connection that a table allows: from this network, to this port, by this grant, to this endpoint. True = it may be new.
type Allowed = (IpNet, Protocol, u16, GrantId, SocketAddr, bool);

fn allowed_connections(table: &Table) -> BTreeSet<Allowed> {
    let mut out = BTreeSet::new();
    for (network, sandbox) in &table.sandboxes {
        for ((_, protocol, port), grant) in table.grants.iter().filter(|((of, ..), _)| of == sandbox) {
            let Balancer { v4, v6, .. } = &grant.balancer;
            let new = v4.iter().chain(v6).map(|socket| (socket, true));
            for (socket, new) in new.chain(grant.standing.iter().map(|socket| (socket, false))) {
                out.insert((*network, *protocol, *port, grant.id, *socket, new));
            }
        }
    }
    out
}

proptest! {
    #[test]
    fn steps_end_at_the_table_and_open_nothing_else((old, new) in two_inputs(), limit in 1usize..8) {
        let (old, new) = (compile(&old).table, compile(&new).table);
        let known: BTreeSet<Allowed> = allowed_connections(&old).union(&allowed_connections(&new)).copied().collect();
        let grants = |table: &Table| -> BTreeSet<_> { table.grants.iter().map(|(place, grant)| (*place, grant.id)).collect() };
        let mut now = old.clone();
        for _ in 0..1000 {
            if now == new {
                break;
            }
            let next = Table::step_within(limit, Some(&now), &new);
            prop_assert_ne!(&next, &now);
            prop_assert!(allowed_connections(&next).is_subset(&known), "{:?}", allowed_connections(&next).difference(&known));
            // Nothing is added before everything obsolete is removed.
            let added = !grants(&next).is_subset(&grants(&old));
            prop_assert!(!added || grants(&next).is_subset(&grants(&new)));
            if now.frame == next.frame {
                let mut kernel = written(&now).map_err(TestCaseError::fail)?;
                let script = update(Some(&now), &next);
                kernel.apply(&script.unwrap_or_default()).map_err(TestCaseError::fail)?;
                prop_assert_eq!(Ok(kernel), written(&next));
            }
            now = next;
        }
        prop_assert_eq!(now, new);
    }

    #[test]
    fn update_leads_to_the_same_table_as_a_whole_write((old, new) in two_inputs()) {
        let (old, new) = (compile(&old).table, compile(&new).table);
        let want = written(&new);
        let script = update(Some(&old), &new);
        if old.frame == new.frame {
            let mut kernel = written(&old).map_err(TestCaseError::fail)?;
            kernel.apply(&script.unwrap_or_default()).map_err(TestCaseError::fail)?;
            prop_assert_eq!(Ok(kernel), want);
        } else {
            prop_assert_eq!(script, update(None, &new));
        }
        prop_assert_eq!(update(Some(&new), &new), None);
    }

    #[test]
    fn text_of_objects_does_not_reach_the_script(
        inputs in vec(any_text(), 1..3).prop_flat_map(any_inputs),
    ) {
        let table = compile(&inputs).table;
        // The rules are those of a gateway without any object.
        let empty = Inputs { accesses: Vec::new(), services: BTreeMap::new(), ..inputs };
        prop_assert_eq!(&table.frame, &compile(&empty).table.frame);
        written(&table).map_err(TestCaseError::fail)?;
    }

    #[test]
    fn served_parts_do_not_conflict(inputs in any_inputs(few())) {
        let Compiled { peers, routes, table, served, .. } = compile(&inputs);
        prop_assert_eq!(&routes, &table.sandboxes.keys().copied().collect());
        prop_assert!(served.iter().all(|name| inputs.accesses.iter().any(|access| access.name == *name)));
        let networks: Vec<&IpNet> = routes.iter().collect();
        for (at, network) in networks.iter().enumerate() {
            prop_assert!(networks[at + 1..].iter().all(|other| !overlap(network, other)), "{networks:?}");
        }
        let allowed: Vec<&IpNet> = peers.values().flat_map(|peer| &peer.allowed_ips).collect();
        prop_assert_eq!(allowed.iter().collect::<BTreeSet<_>>().len(), allowed.len());
        prop_assert!(allowed.iter().all(|ip| routes.iter().any(|network| network.contains(*ip))));
        let closed = ["192.0.2.1", "10.244.0.9"].map(|text| host(ip(text)));
        for ((_, protocol, _), grant) in &table.grants {
            prop_assert!(*protocol != Protocol::Sctp);
            let Balancer { v4, v6, .. } = &grant.balancer;
            prop_assert!(v4.iter().all(SocketAddr::is_ipv4) && v6.iter().all(SocketAddr::is_ipv6));
            prop_assert!(v4.iter().chain(v6).all(|socket| grant.standing.contains(socket)));
            let open = |socket: &SocketAddr| !closed.contains(&host(socket.ip())) && socket.port() != 10250;
            prop_assert!(grant.standing.iter().all(open));
        }
    }
}
