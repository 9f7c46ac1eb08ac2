//! A model of nftables in the kernel. It accepts only lines of the known forms, and no transaction that the kernel would refuse.

use super::*;

/// The kind of a value in an element's key or data.
#[derive(Debug, Clone, Copy)]
enum ValueKind {
    Mark,
    Protocol,
    Port,
    Address,
    Network,
    GotoChain,
    QuotedLimit,
    Socket,
}

fn is_8_hex_digits(text: &str) -> bool {
    text.len() == 8 && text.bytes().all(|byte| matches!(byte, b'0'..=b'9' | b'a'..=b'f'))
}

fn is_chain_name(text: &str) -> bool {
    let text = text.strip_suffix("-by-address").unwrap_or(text);
    let count = ["choose4-", "choose6-"]
        .iter()
        .find_map(|start| text.strip_prefix(start));
    count.is_some_and(|count| count.parse::<usize>().is_ok_and(|count| count > 0))
}

fn is_limit_name(text: &str) -> bool {
    text.strip_prefix("sandbox-").is_some_and(is_8_hex_digits)
}

impl ValueKind {
    fn is(self, text: &str) -> bool {
        match self {
            Self::Mark => text.strip_prefix("0x").is_some_and(is_8_hex_digits),
            Self::Protocol => matches!(text, "tcp" | "udp"),
            Self::Port => text.parse::<u16>().is_ok(),
            Self::Address => text.parse::<IpAddr>().is_ok(),
            Self::Network => text.parse::<IpNet>().is_ok(),
            Self::GotoChain => text.strip_prefix("goto ").is_some_and(is_chain_name),
            Self::Socket => is_key(&[Self::Address, Self::Port], text),
            Self::QuotedLimit => text
                .strip_prefix('"')
                .and_then(|text| text.strip_suffix('"'))
                .is_some_and(is_limit_name),
        }
    }
}

/// The kinds of the values of a set's elements: those of the key, and the data of a map.
fn kinds_of(set: &str) -> Option<(&'static [ValueKind], Option<ValueKind>)> {
    use ValueKind::*;
    Some(match set {
        "limits" => (&[Mark], Some(QuotedLimit)),
        "services4" | "services6" => (&[Mark], Some(GotoChain)),
        "backends4" | "backends6" => (&[Mark, Mark], Some(Socket)),
        "sandboxes4" | "sandboxes6" => (&[Network], Some(Mark)),
        "grants" => (&[Mark, Protocol, Port], Some(Mark)),
        "open" => (&[Mark, Protocol, Port, Mark], None),
        "endpoints4" | "endpoints6" => (&[Mark, Address, Port], None),
        "hosts4" | "hosts6" => (&[Mark, Address], None),
        _ => return None,
    })
}

/// One command of a script, except those of `render::base_table`. A line with several elements is one command for each of them.
#[derive(Debug, Clone, PartialEq, Eq)]
enum Command<'a> {
    /// Set or map, key, and the data of a map.
    AddElement(&'a str, &'a str, Option<&'a str>),
    /// Set or map, and key.
    DeleteElement(&'a str, &'a str),
    AddChain(&'a str),
    FlushChain(&'a str),
    DeleteChain(&'a str),
    AddRule(&'a str, &'a str),
    AddLimit(&'a str, &'a str),
    DeleteLimit(&'a str),
}

/// Parses `SET { KEY : DATA, .. }`, or `SET { KEY, .. }`.
fn elements(text: &str, with_data: bool) -> Option<Vec<(&str, &str, Option<&str>)>> {
    let (set, rest) = text.strip_suffix(" }")?.split_once(" { ")?;
    let (key_kinds, data_kind) = kinds_of(set)?;
    let element = |text| {
        let (key, data) = match data_kind.filter(|_| with_data) {
            Some(kind) => {
                let (key, data): (&str, _) = str::split_once(text, " : ")?;
                (key, Some(data).filter(|data| kind.is(data))?)
            }
            None => return is_key(key_kinds, text).then_some((set, text, None)),
        };
        is_key(key_kinds, key).then_some((set, key, Some(data)))
    };
    rest.split(", ").map(element).collect()
}

fn is_key(kinds: &[ValueKind], key: &str) -> bool {
    let texts: Vec<&str> = key.split(" . ").collect();
    texts.len() == kinds.len() && kinds.iter().zip(texts).all(|(kind, text)| kind.is(text))
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

impl<'a> Command<'a> {
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
            "add chain" if is_chain_name(rest) => Self::AddChain(rest),
            "flush chain" if is_chain_name(rest) => Self::FlushChain(rest),
            "delete chain" if is_chain_name(rest) => Self::DeleteChain(rest),
            "add rule" => {
                let (chain, rule) = rest.split_once(' ')?;
                (is_chain_name(chain) && is_rule(chain, rule)?).then_some(Self::AddRule(chain, rule))?
            }
            "add limit" => {
                let (limit, rate) = rest.split_once(' ')?;
                (is_limit_name(limit) && is_rate(rate)?).then_some(Self::AddLimit(limit, rate))?
            }
            "delete limit" if is_limit_name(rest) => Self::DeleteLimit(rest),
            _ => return None,
        };
        Some(vec![one])
    }
}

/// A model of the kernel's table, without the rules of `render::base_table`.
#[derive(Debug, Clone, Default, PartialEq, Eq)]
pub(super) struct Kernel {
    elements: BTreeMap<(String, String), Option<String>>,
    chains: BTreeMap<String, Vec<String>>,
    limits: BTreeMap<String, String>,
}

impl Kernel {
    /// Applies a script at least as strictly as the kernel does. An added element, chain or limit must be new, and what it refers to must
    /// exist. A deleted element, chain or limit must exist, and nothing may refer to it.
    pub(super) fn apply(&mut self, script: &str) -> Result<(), String> {
        for line in script.lines() {
            let parsed = Command::parse(line).ok_or_else(|| format!("unknown form: {line:?}"))?;
            if !parsed.into_iter().all(|command| self.apply_command(command)) {
                return Err(format!("refused: {line} of\n{script}"));
            }
        }
        self.check_backends()
    }

    /// Checks that `backends4` and `backends6` have an element for every index that the chain of a service can compute (by numgen or
    /// jhash), and no other elements.
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
            for index in 0..count.parse::<u32>().map_err(|error| error.to_string())? {
                backends.insert((format!("backends{family}"), format!("{key} . {index:#010x}")));
            }
        }
        let existing = self.elements.keys().filter(|(set, _)| set.starts_with("backends"));
        let existing: BTreeSet<_> = existing.cloned().collect();
        if existing == backends {
            Ok(())
        } else {
            Err(format!("{existing:?} instead of {backends:?}"))
        }
    }

    fn is_referred_to(&self, data: &str) -> bool {
        self.elements.values().any(|other| other.as_deref() == Some(data))
    }

    fn apply_command(&mut self, command: Command<'_>) -> bool {
        match command {
            Command::AddElement(set, key, data) => {
                self.is_free(set, key)
                    && self.references_exist(set, key, data)
                    && self
                        .elements
                        .insert((set.to_owned(), key.to_owned()), data.map(str::to_owned))
                        .is_none()
            }
            Command::DeleteElement(set, key) => {
                let removed = self.elements.remove(&(set.to_owned(), key.to_owned())).is_some();
                let used = match set {
                    "open" => self.elements.iter().any(|((other, grant), data)| {
                        other == "grants" && data.as_ref().is_some_and(|mark| format!("{grant} . {mark}") == key)
                    }),
                    _ => false,
                };
                removed && !used
            }
            Command::AddChain(chain) => self.chains.insert(chain.to_owned(), Vec::new()).is_none(),
            Command::FlushChain(chain) => self.chains.get_mut(chain).map(Vec::clear).is_some(),
            Command::AddRule(chain, rule) => self
                .chains
                .get_mut(chain)
                .map(|rules| rules.push(rule.to_owned()))
                .is_some(),
            Command::DeleteChain(chain) => {
                let empty = self.chains.remove(chain).is_some_and(|rules| rules.is_empty());
                empty && !self.is_referred_to(&format!("goto {chain}"))
            }
            Command::AddLimit(limit, rate) => self.limits.insert(limit.to_owned(), rate.to_owned()).is_none(),
            Command::DeleteLimit(limit) => {
                self.limits.remove(limit).is_some() && !self.is_referred_to(&format!("\"{limit}\""))
            }
        }
    }

    /// Whether the kernel accepts a new key. A network must be in the map of its family, and overlap no other network in that map.
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

    /// Whether everything exists to which an element refers: its chain or limit, or the element of `open` that belongs to a grant.
    fn references_exist(&self, set: &str, key: &str, data: Option<&str>) -> bool {
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

/// The model of the kernel after the whole `table` was written.
pub(super) fn kernel_with_table(table: &Table) -> Result<Kernel, String> {
    let script = update(None, table).unwrap_or_default();
    let lines = script
        .strip_prefix(&render::base_table(&table.parameters))
        .ok_or("the script does not start with the rules")?;
    let mut kernel = Kernel::default();
    kernel.apply(lines)?;
    Ok(kernel)
}
