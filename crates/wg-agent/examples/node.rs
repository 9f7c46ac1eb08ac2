//! Sets up, without an API server, the state that a pass of the agent applies to a node: the kernel's WireGuard with one peer, firewall
//! table, routes, rules and sysctls. `cargo xtask bench dataplane --vm` compares this node with WireGuard configured by hand. Needs root
//! and its own network namespace.
//!
//! Prints `ready`. When its standard input closes, removes everything except the sysctls.
//!
//! ```text
//! node --interface wg1 --private-key-file key1 --listen-port 51820 --underlay eth0,192.0.2.1 --address 10.9.0.1 \
//!     --peer KEY,192.0.2.2:51820,10.9.0.2
//! ```

use std::{
    collections::{BTreeMap, BTreeSet},
    net::{IpAddr, SocketAddr},
    path::PathBuf,
};

use anyhow::{Context, ensure};
use base64::{Engine, engine::general_purpose::STANDARD};
use clap::Parser;
use clustermesh_agent_core::{
    compile::{Inputs, Node, Peer, compile},
    device::diff,
    interface::InterfaceName,
    numbers::MARK_UNDERLAY,
};
use clustermesh_core::{
    key::PublicKey,
    observe::{PeerRole, PolicySpec},
};
use ipnet::IpNet;
use wg_agent::{
    device::{Configuration, Device, kernel::Kernel},
    firewall::{FirewallManager, Nft},
    route::{self, Netlink},
};
use x25519_dalek::StaticSecret;

#[derive(Debug, Parser)]
struct Args {
    #[arg(long)]
    interface: InterfaceName,
    /// A file in the format of `wg genkey`.
    #[arg(long)]
    private_key_file: PathBuf,
    #[arg(long, default_value_t = 51820)]
    listen_port: u16,
    #[arg(long, default_value_t = 1420)]
    mtu: u16,
    /// INTERFACE,ADDRESS from which outer packets are sent.
    #[arg(long)]
    underlay: String,
    /// WireGuard address of this node.
    #[arg(long)]
    address: IpAddr,
    /// KEY,ENDPOINT,ADDRESS of the other node.
    #[arg(long)]
    peer: String,
}

fn main() -> anyhow::Result<()> {
    let Args {
        interface,
        private_key_file,
        listen_port,
        mtu,
        underlay,
        address,
        peer,
    } = Args::parse();
    let private_key = private_key(&private_key_file)?;
    let (underlay_interface, underlay_address) = underlay.split_once(',').context("--underlay INTERFACE,ADDRESS")?;
    let underlay_address: IpAddr = underlay_address.parse()?;
    let mut words = peer.split(',');
    let mut word = || words.next().context("--peer KEY,ENDPOINT,ADDRESS");
    let (key, endpoint, other) = (word()?.parse()?, word()?.parse()?, word()?.parse()?);
    let node = Node {
        name: "here".into(),
        public_key: PublicKey::new(x25519_dalek::PublicKey::from(&private_key).to_bytes()),
        wireguard_ips: [address].into(),
        device: interface.clone(),
        listen_port,
        mtu,
        underlay: underlay_interface.parse()?,
        underlay_addresses: [underlay_address].into(),
        // Other members reach the node itself only at its InternalIPs and at its addresses in anchored networks. The benchmark
        // connects to the WireGuard address, so this node has that address as an InternalIP, too.
        internal_ips: [underlay_address, address].into(),
        pod_cidrs: BTreeSet::new(),
    };
    let compiled = compile(&inputs(node, key, endpoint, other));
    ensure!(compiled.refused.is_empty(), "refused: {:?}", compiled.refused);
    let configuration = Configuration {
        private_key,
        listen_port,
        fwmark: MARK_UNDERLAY,
        mtu,
    };
    let mut device = Kernel::open(interface.as_str(), &configuration)?;
    let runtime = tokio::runtime::Builder::new_current_thread().enable_all().build()?;
    runtime.block_on(async {
        let mut manager = FirewallManager::new(Nft::default());
        manager.converge(&compiled.firewall).await?;
        let changes = diff(&device.observe()?.peers, &compiled.peers).unwrap_or_default();
        device.apply(&changes)?;
        let mut routing = Netlink::open(interface.clone())?;
        let failed = route::converge(&mut routing, &compiled.routes).await?.failed;
        ensure!(failed.is_empty(), "routes: {failed:?}");
        let mut settings = compiled.sysctls.clone();
        // On a real node a privileged init container writes some of these sysctls. Here all are written.
        settings.iter_mut().for_each(|setting| setting.write = true);
        let missing = route::sysctl::ensure(&settings).await;
        ensure!(missing.is_empty(), "sysctls: {missing:?}");
        println!("ready");
        std::io::copy(&mut std::io::stdin().lock(), &mut std::io::sink())?;
        let left = route::cleanup(&mut routing).await;
        ensure!(left.is_empty(), "routes that were not removed: {left:?}");
        manager.destroy().await?;
        anyhow::Ok(())
    })?;
    Ok(Box::new(device).close()?)
}

/// The inputs of this node in a mesh of two members with one node each. The other node may reach this one.
fn inputs(node: Node, key: PublicKey, endpoint: SocketAddr, other: IpAddr) -> Inputs {
    let host_prefix = |address: IpAddr| BTreeSet::from([IpNet::from(address)]);
    let policy = PolicySpec {
        sources: host_prefix(other),
        networks: host_prefix(other),
        allow: node.wireguard_ips.iter().map(|address| IpNet::from(*address)).collect(),
        ..PolicySpec::default()
    };
    Inputs {
        peers: vec![Peer {
            name: "there".into(),
            revision: 1,
            public_key: key,
            preshared_key: None,
            endpoint: Some(endpoint),
            candidates: Vec::new(),
            keepalive: None,
            allowed_ips: host_prefix(other).into_iter().collect(),
            role: PeerRole::Node,
        }],
        policies: [("there".into(), policy)].into(),
        node,
        throw: BTreeSet::new(),
        api_servers: BTreeSet::new(),
        all_node_addresses: BTreeSet::new(),
        pod_cidrs_of_other_nodes: BTreeSet::new(),
        own_sources: BTreeSet::new(),
        peer_mtus: BTreeMap::new(),
    }
}

fn private_key(path: &PathBuf) -> anyhow::Result<StaticSecret> {
    let text = std::fs::read_to_string(path).with_context(|| format!("read {}", path.display()))?;
    let bytes = STANDARD.decode(text.trim()).context("a private key is base64")?;
    let bytes: [u8; 32] = bytes.try_into().ok().context("a private key has 32 bytes")?;
    Ok(bytes.into())
}
