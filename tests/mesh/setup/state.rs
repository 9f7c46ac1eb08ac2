//! Reads the state that tests compare: objects with their resourceVersions, conditions, and a node's kernel state, read
//! with `ip` and `nft` instead of our own code.

use std::collections::{BTreeMap, BTreeSet};

use clustermesh_lab::{Cluster, MESH, NAMESPACE, Node};
use serde_json::Value;

use super::json;

/// The resourceVersions of all objects of a kind, by `namespace/name`.
pub(crate) async fn versions(cluster: &Cluster<'_>, kind: &str) -> BTreeMap<String, String> {
    let list = json(cluster, &["get", kind, "--all-namespaces"]).await;
    let text = |value: &Value| value.as_str().unwrap_or_default().to_owned();
    let version = |object: &Value| {
        let meta = &object["metadata"];
        let name = format!("{}/{}", text(&meta["namespace"]), text(&meta["name"]));
        (name, text(&meta["resourceVersion"]))
    };
    list["items"].as_array().unwrap().iter().map(version).collect()
}

/// Status, reason and message of a condition of the mesh; all empty if the mesh does not have it.
pub(crate) async fn condition(hub: &Cluster<'_>, kind: &str) -> (String, String, String) {
    let mesh = json(hub, &["-n", NAMESPACE, "get", "clustermesh", MESH]).await;
    let conditions = mesh["status"]["conditions"].as_array().cloned().unwrap_or_default();
    let condition = conditions.into_iter().find(|condition| condition["type"] == kind);
    let condition = condition.unwrap_or_default();
    let text = |key: &str| condition[key].as_str().unwrap_or_default().to_owned();
    (text("status"), text("reason"), text("message"))
}

/// The names of the links and nftables tables of a node, its policy routing rules and its routes. The veth links of pods with their
/// routes, and the routes of the node's own link-local addresses, are left out, because they change at any time.
#[derive(Debug, PartialEq, Eq)]
pub(crate) struct NodeState {
    links: BTreeSet<String>,
    rules: BTreeSet<String>,
    routes: BTreeSet<String>,
    tables: BTreeSet<String>,
}

impl NodeState {
    pub(crate) async fn of(node: &Node<'_>) -> Self {
        let read = async |args: &[&str]| -> Vec<Value> {
            let text = node.exec(args).await.unwrap().stdout;
            let value: Value = serde_json::from_str(&text).unwrap();
            match value {
                Value::Array(entries) => entries,
                // The output of nft.
                other => other["nftables"].as_array().cloned().unwrap_or_default(),
            }
        };
        let is_not_veth =
            |key: &'static str| move |entry: &Value| !entry[key].as_str().unwrap_or_default().starts_with("veth");
        let links = read(&["ip", "-j", "link"])
            .await
            .into_iter()
            .filter(is_not_veth("ifname"));
        let [mut routes, v6] = [
            read(&["ip", "-4", "-j", "route", "show", "table", "all"]).await,
            read(&["ip", "-6", "-j", "route", "show", "table", "all"]).await,
        ];
        routes.extend(v6);
        let mut rules = read(&["ip", "-4", "-j", "rule"]).await;
        rules.extend(read(&["ip", "-6", "-j", "rule"]).await);
        let tables = read(&["nft", "-j", "list", "tables"]).await.into_iter();
        let table = |entry: Value| entry.get("table").map(|t| format!("{} {}", t["family"], t["name"]));
        Self {
            links: links.map(|link| link["ifname"].to_string()).collect(),
            rules: rules.iter().map(ToString::to_string).collect(),
            routes: routes
                .into_iter()
                .filter(is_not_veth("dev"))
                .filter(|route| !route["dst"].as_str().is_some_and(is_own_link_local))
                .map(|route| route.to_string())
                .collect(),
            tables: tables.filter_map(table).collect(),
        }
    }
}

/// Whether a route is for a link-local address of the node itself. The link-local address of a bridge follows the bridge's MAC address.
/// This is the lowest MAC address of its ports and can change whenever a pod starts.
fn is_own_link_local(destination: &str) -> bool {
    destination.starts_with("fe80:") && !destination.contains('/')
}
