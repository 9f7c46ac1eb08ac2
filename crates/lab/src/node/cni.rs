//! Does the work of a CNI daemon: adds routes to the other nodes' pod ranges, direct ones or through a VXLAN (as flannel's host-gw and
//! vxlan backends), and masquerades pod traffic that leaves the cluster's pod range.

use std::collections::BTreeMap;
use std::fmt::Write;
use std::net::{IpAddr, Ipv4Addr};
use std::process::{Command, Stdio};
use std::time::Duration;

use anyhow::{Context, Result};
use futures::TryStreamExt;
use ipnet::IpNet;
use k8s_openapi::api::core::v1::Node;
use kube::api::Api;
use kube::config::{KubeConfigOptions, Kubeconfig};
use kube::runtime::{WatchStreamExt, watcher};

use super::Settings;
use crate::PodNetwork;
use crate::plan::VXLAN_OVERHEAD;

/// Node name -> pod range and node address, for each family.
type Nodes = BTreeMap<String, Vec<(IpNet, IpAddr)>>;

pub(super) async fn run(settings: &Settings) -> Result<()> {
    // kube-proxy's user may read every Node, the kubelet's may not.
    let kubeconfig = Kubeconfig::read_from(settings.cluster_directory().join("proxy.kubeconfig"))?;
    let mut config = kube::Config::from_custom_kubeconfig(kubeconfig, &KubeConfigOptions::default()).await?;
    // A worker in a pod loses connections to its API server's ClusterIP without notice when it moves: the new host node has no conntrack
    // entry of them. The API server ends each watch after 5 s, so a longer silence is such a loss.
    config.read_timeout = Some(Duration::from_secs(10));
    let nodes: Api<Node> = Api::all(kube::Client::try_from(config)?);
    let events = watcher(nodes, watcher::Config::default().timeout(5)).default_backoff();
    let mut events = std::pin::pin!(events);
    let mut known = Nodes::new();
    let mut listed = Nodes::new();
    let mut applied = Nodes::new();
    if settings.pod_network == PodNetwork::Vxlan {
        create_overlay(settings.addresses[0])?;
    }
    loop {
        // After an error the watch continues, with a backoff.
        match events.try_next().await {
            Ok(Some(watcher::Event::Init)) => listed.clear(),
            Ok(Some(watcher::Event::InitApply(node))) => update(&mut listed, &node),
            Ok(Some(watcher::Event::InitDone)) => known = listed.clone(),
            Ok(Some(watcher::Event::Apply(node))) => update(&mut known, &node),
            Ok(Some(watcher::Event::Delete(node))) => drop(known.remove(node.metadata.name.as_deref().unwrap_or(""))),
            Ok(None) => anyhow::bail!("the watch ended"),
            Err(error) => {
                eprintln!("watch nodes: {error}");
                continue;
            }
        }
        if known != applied {
            apply(settings, &applied, &known)?;
            applied = known.clone();
        }
    }
}

fn update(nodes: &mut Nodes, node: &Node) {
    let Some(name) = node.metadata.name.clone() else { return };
    let addresses: Vec<IpAddr> = node
        .status
        .iter()
        .flat_map(|status| status.addresses.iter().flatten())
        .filter(|address| address.type_ == "InternalIP")
        .filter_map(|address| address.address.parse().ok())
        .collect();
    let ranges = node.spec.iter().flat_map(|spec| spec.pod_cidrs.iter().flatten());
    let found: Option<Vec<(IpNet, IpAddr)>> = ranges
        .map(|range| {
            let range: IpNet = range.parse().ok()?;
            let is_same_family = |address: &&IpAddr| address.is_ipv4() == range.addr().is_ipv4();
            Some((range, *addresses.iter().find(is_same_family)?))
        })
        .collect();
    // A node is known only with all its families. `apply` writes the names of the known nodes to the file `routes`: another
    // node's name in that file means that this node has routes to that node's pods in all families.
    match found.filter(|found| !found.is_empty()) {
        Some(found) => drop(nodes.insert(name, found)),
        None => drop(nodes.remove(&name)),
    }
}

fn apply(settings: &Settings, before: &Nodes, now: &Nodes) -> Result<()> {
    let mut batch = String::new();
    for (name, ranges) in before.iter().filter(|(name, _)| !now.contains_key(*name)) {
        for (range, _) in ranges.iter().filter(|_| *name != settings.name) {
            writeln!(batch, "route del {range}")?;
        }
    }
    for (name, ranges) in now {
        if *name != settings.name && before.get(name) != Some(ranges) {
            for (range, address) in ranges {
                match (settings.pod_network, address) {
                    (PodNetwork::Vxlan, IpAddr::V4(address)) => {
                        let mac = overlay_mac(*address);
                        writeln!(batch, "neigh replace {address} lladdr {mac} dev vx nud permanent")?;
                        writeln!(batch, "route replace {range} via {address} dev vx onlink")?;
                        let entry = format!("fdb replace {mac} dev vx dst {address} self permanent\n");
                        run_with_stdin(&["bridge", "-batch", "-"], &entry)?;
                    }
                    _ => writeln!(batch, "route replace {range} via {address}")?,
                }
            }
        }
    }
    // A route may already be deleted. With `-force`, `ip` then continues with the next line.
    run_with_stdin(&["ip", "-force", "-batch", "-"], &batch)?;
    if let Some(ranges) = now.get(&settings.name)
        && before.get(&settings.name) != now.get(&settings.name)
    {
        for (range, _) in ranges {
            masquerade(settings, *range)?;
        }
    }
    let names: String = now.keys().map(|name| format!("{name}\n")).collect();
    let file = settings.directory().join("routes");
    std::fs::write(&file, names).with_context(|| format!("write {}", file.display()))
}

/// Creates the device of the VXLAN. It exists already if this process was restarted.
fn create_overlay(address: IpAddr) -> Result<()> {
    let IpAddr::V4(address) = address else {
        anyhow::bail!("the VXLAN carries IPv4 only, and the node's address is {address}");
    };
    let (mac, mtu) = (overlay_mac(address), overlay_mtu()?);
    let batch =
        format!("link add vx type vxlan id 1 dstport 8472 nolearning\nlink set vx address {mac} mtu {mtu} up\n");
    run_with_stdin(&["ip", "-force", "-batch", "-"], &batch)
}

/// The MTU of the VXLAN and of pods in it.
pub(super) fn overlay_mtu() -> Result<u16> {
    let mtu: u16 = std::fs::read_to_string("/sys/class/net/eth0/mtu")?.trim().parse()?;
    Ok(mtu.saturating_sub(VXLAN_OVERHEAD))
}

/// The MAC address of a node's VXLAN device. All nodes compute it from the node's address.
fn overlay_mac(address: Ipv4Addr) -> String {
    let [a, b, c, d] = address.octets();
    format!("0e:00:{a:02x}:{b:02x}:{c:02x}:{d:02x}")
}

/// Masquerades packets from `range`, this node's part of the cluster's pod range, to destinations outside the cluster's range.
/// A worker of another cluster that is a pod on this node has an address in a part that belongs to no node, so its packets
/// keep their source.
fn masquerade(settings: &Settings, range: IpNet) -> Result<()> {
    let Some(all) = settings.pod_cidrs.iter().find(|all| all.contains(&range)) else {
        return Ok(());
    };
    let family = if range.addr().is_ipv4() { "ip" } else { "ip6" };
    let table = format!(
        "table {family} cni\ndelete table {family} cni\ntable {family} cni {{\n chain postrouting {{\n  \
         type nat hook postrouting priority 100; policy accept;\n  \
         {family} saddr {range} {family} daddr != {all} counter masquerade\n }}\n}}\n"
    );
    run_with_stdin(&["nft", "-f", "-"], &table)
}

/// Runs a program with this text as its standard input; does not run it if the text is empty. With `-force`, the exit status is ignored.
pub(super) fn run_with_stdin(argv: &[&str], text: &str) -> Result<()> {
    if text.is_empty() {
        return Ok(());
    }
    let mut child = Command::new(argv[0])
        .args(&argv[1..])
        .stdin(Stdio::piped())
        .spawn()
        .context(argv.join(" "))?;
    std::io::Write::write_all(&mut child.stdin.take().context("no pipe")?, text.as_bytes())?;
    let status = child.wait()?;
    anyhow::ensure!(
        status.success() || argv.contains(&"-force"),
        "{} failed: {status}",
        argv.join(" ")
    );
    Ok(())
}
