//! Whether what `nft -j` lists is the table that was asked for: the elements of every set, and how many rules each chain has.
//! The rules' own text nft spells its own way, and one transaction writes all of them or none.

use clustermesh_agent_core::firewall::{Expected, Firewall, expected};
use serde_json::Value;

/// The first difference, in words.
pub(super) fn confirms(listing: &Value, firewall: &Firewall) -> Result<(), String> {
    let Expected { sets, rules } = expected(firewall);
    let there = read(listing);
    for (name, wanted) in &sets {
        let found = there.sets.get(name).ok_or_else(|| format!("set {name} is missing"))?;
        if let Some(element) = wanted.symmetric_difference(found).next() {
            let which = if wanted.contains(element) { "lacks" } else { "holds" };
            return Err(format!("set {name} {which} {element}"));
        }
    }
    for (name, wanted) in &rules {
        let found = there
            .rules
            .get(name)
            .ok_or_else(|| format!("chain {name} is missing"))?;
        if wanted != found {
            return Err(format!("chain {name} has {found} rules instead of {wanted}"));
        }
    }
    Ok(())
}

fn read(listing: &Value) -> Expected {
    let mut found = Expected::default();
    for object in listing.as_array().into_iter().flatten() {
        if let Some(chain) = object.get("chain") {
            found.rules.entry(text(&chain["name"])).or_default();
        }
        if let Some(rule) = object.get("rule") {
            *found.rules.entry(text(&rule["chain"])).or_default() += 1;
        }
        if let Some(set) = object.get("set") {
            let elements = set["elem"].as_array().into_iter().flatten();
            let types = set["type"].as_array().map_or(&[][..], Vec::as_slice);
            let elements = elements.map(|value| element(value, types));
            found.sets.insert(text(&set["name"]), elements.collect());
        }
    }
    found
}

/// An element as the table is written, of a set whose fields have these types; anything unknown stays JSON, and differs.
fn element(value: &Value, types: &[Value]) -> String {
    if let Some(inner) = value.get("elem") {
        return element(&inner["val"], types);
    }
    if let Some(Value::Array(parts)) = value.get("concat") {
        let fields = parts.iter().zip(types.iter().chain(std::iter::repeat(&Value::Null)));
        let fields = fields.map(|(part, kind)| {
            if kind == "inet_proto" {
                protocol(part)
            } else {
                element(part, &[])
            }
        });
        return fields.collect::<Vec<_>>().join(" . ");
    }
    if let Some(prefix) = value.get("prefix") {
        return format!("{}/{}", text(&prefix["addr"]), prefix["len"]);
    }
    text(value)
}

/// By name. Without `/etc/protocols`, as in our image, nft has numbers.
fn protocol(value: &Value) -> String {
    match value.as_u64() {
        Some(6) => "tcp".into(),
        Some(17) => "udp".into(),
        Some(132) => "sctp".into(),
        _ => text(value),
    }
}

fn text(value: &Value) -> String {
    value.as_str().map_or_else(|| value.to_string(), str::to_owned)
}

#[cfg(test)]
mod tests {
    use serde_json::json;

    use super::*;

    #[test]
    fn a_protocol_reads_the_same_by_name_and_by_number_and_nothing_else_does() {
        let set = |protocol: Value, port: Value| {
            let prefix = json!({"prefix": {"addr": "10.5.0.0", "len": 16}});
            let types = ["ipv4_addr", "ipv4_addr", "inet_proto", "inet_service"];
            let element = json!({"concat": [prefix, "10.6.0.1", protocol, port]});
            read(&json!([{"set": {"name": "s", "type": types, "elem": [{"elem": {"val": element, "timeout": 900}}]}}]))
                .sets
        };
        let written = |text: &str| [("s".to_owned(), [text.to_owned()].into())].into();
        assert_eq!(set(json!("tcp"), json!(6)), written("10.5.0.0/16 . 10.6.0.1 . tcp . 6"));
        assert_eq!(set(json!(6), json!(6)), written("10.5.0.0/16 . 10.6.0.1 . tcp . 6"));
        assert_eq!(set(json!(17), json!(53)), written("10.5.0.0/16 . 10.6.0.1 . udp . 53"));
        assert_eq!(set(json!(1), json!(53)), written("10.5.0.0/16 . 10.6.0.1 . 1 . 53"));
    }
}
