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
            found.sets.insert(text(&set["name"]), elements.map(element).collect());
        }
    }
    found
}

/// An element as the table is written; anything unknown stays JSON, and differs.
fn element(value: &Value) -> String {
    if let Some(inner) = value.get("elem") {
        return element(&inner["val"]);
    }
    if let Some(Value::Array(parts)) = value.get("concat") {
        return parts.iter().map(element).collect::<Vec<_>>().join(" . ");
    }
    if let Some(prefix) = value.get("prefix") {
        return format!("{}/{}", text(&prefix["addr"]), prefix["len"]);
    }
    text(value)
}

fn text(value: &Value) -> String {
    value.as_str().map_or_else(|| value.to_string(), str::to_owned)
}
