//! Sets up the state that a pass of `wg-agent --mode=gateway` applies, without an API server: the kernel's WireGuard with one sandbox node
//! as its peer, the firewall table with a TCP and a UDP grant, routes and forwarding. `cargo xtask bench dataplane --vm` measures flows
//! through this gateway. Needs root and its own network namespace.
//!
//! Prints `ready`, and removes everything except the sysctl when its standard input closes.
//!
//! ```text
//! gateway --interface wg1 --private-key-file key1 --listen-port 51820 --address 10.9.0.2 --peer KEY,10.9.0.1 \
//!     --pod 10.244.0.2 --tcp-port 5201 --udp-port 7
//! ```

use std::{
    collections::{BTreeMap, BTreeSet},
    net::IpAddr,
    path::PathBuf,
    time::Duration,
};

use anyhow::{Context, ensure};
use base64::{Engine, engine::general_purpose::STANDARD};
use clap::Parser;
use clustermesh_agent_core::{
    device::diff,
    gateway::{
        Access, Endpoint, GrantSpec, Inputs, Node, ObservedService, Service, Settings, compile, render_renewal, update,
    },
    interface::InterfaceName,
    routes::{Plan, desired},
    sysctl::{Name, Sysctl},
};
use clustermesh_core::{
    key::PublicKey,
    mesh::{ObjectName, Protocol},
};
use ipnet::IpNet;
use wg_agent::{
    device::{Configuration, Device, kernel::Kernel},
    firewall::{Backend, Nft},
    route::{self, Netlink},
};
use x25519_dalek::StaticSecret;

/// The default of `--grant-timeout`.
const GRANT_TIMEOUT: Duration = Duration::from_secs(15 * 60);

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
    /// WireGuard address of this gateway.
    #[arg(long)]
    address: IpAddr,
    /// KEY,ADDRESS of the sandbox's node.
    #[arg(long)]
    peer: String,
    /// Address of the granted Service's only endpoint. It listens on the same ports as the gateway.
    #[arg(long)]
    pod: IpAddr,
    /// Port of the TCP grant.
    #[arg(long)]
    tcp_port: u16,
    /// Port of the UDP grant.
    #[arg(long)]
    udp_port: u16,
}

fn main() -> anyhow::Result<()> {
    let args = Args::parse();
    let private_key = private_key(&args.private_key_file)?;
    let (key, node) = args.peer.split_once(',').context("--peer KEY,ADDRESS")?;
    let compiled = compile(&inputs(&args, key.parse()?, node.parse()?));
    ensure!(compiled.refused.is_empty(), "refused: {:?}", compiled.refused);
    let Args {
        interface,
        listen_port,
        mtu,
        address,
        ..
    } = args;
    let configuration = Configuration {
        private_key,
        listen_port,
        fwmark: 0,
        mtu,
    };
    let routes = desired(&Plan {
        addresses: [address].into(),
        peers: compiled.routes.clone(),
        mesh: compiled.routes.clone(),
        ..Plan::default()
    });
    let runtime = tokio::runtime::Builder::new_current_thread().enable_all().build()?;
    runtime.block_on(async {
        let mut nft = Nft::default();
        let table = update(None, &compiled.table).unwrap_or_default();
        nft.run(&(table + &render_renewal(&compiled.table.parameters, GRANT_TIMEOUT)))
            .await?;
        let mut device = Kernel::open(interface.as_str(), &configuration)?;
        let mut routing = Netlink::open(interface)?;
        let failed = route::converge(&mut routing, &routes).await?.failed;
        ensure!(failed.is_empty(), "routes: {failed:?}");
        let missing = route::sysctl::ensure(&[forwarding()]).await;
        ensure!(missing.is_empty(), "sysctls: {missing:?}");
        let changes = diff(&device.observe()?.peers, &compiled.peers).unwrap_or_default();
        device.apply(&changes)?;
        println!("ready");
        std::io::copy(&mut std::io::stdin().lock(), &mut std::io::sink())?;
        let left = route::cleanup(&mut routing).await;
        ensure!(left.is_empty(), "routes that were not removed: {left:?}");
        nft.destroy().await?;
        Ok(Box::new(device).close()?)
    })
}

/// One sandbox with one node, and grants of both ports of a Service with one endpoint.
fn inputs(args: &Args, key: PublicKey, node: IpAddr) -> Inputs {
    let service = ObjectName {
        namespace: "bench".to_owned(),
        name: "server".to_owned(),
    };
    let ports = [(Protocol::Tcp, args.tcp_port), (Protocol::Udp, args.udp_port)];
    let granted = |(protocol, gateway_port): (Protocol, u16)| GrantSpec {
        service: service.clone(),
        port: protocol.lowercase().to_owned(),
        protocol,
        gateway_port,
    };
    let endpoint = |(protocol, port): (Protocol, u16)| Endpoint {
        protocol,
        port_name: protocol.lowercase().to_owned(),
        address: args.pod,
        port,
        ready: true,
        serving: true,
    };
    let observed = ObservedService {
        has_selector: true,
        ports: ports
            .map(|(protocol, _)| (protocol, protocol.lowercase().to_owned()))
            .into(),
        endpoints: ports.map(endpoint).into(),
        ..ObservedService::default()
    };
    Inputs {
        settings: Settings {
            interface: args.interface.clone(),
            listen_port: args.listen_port,
            admin_port: 9587,
            addresses: [args.address].into(),
            endpoint_networks: [IpNet::from(args.pod)].into(),
            reserved: [IpNet::from(args.address)].into(),
            serves: BTreeSet::new(),
            // The defaults of `--sandbox-new-flows`, `--sandbox-connections` and `--endpoint-connections`.
            new_connections: 1000,
            sandbox_connections: 16_000,
            endpoint_connections: 4000,
        },
        accesses: vec![Access {
            name: "sandbox".to_owned(),
            identity: "sandbox".to_owned(),
            sandbox: "sandbox".to_owned(),
            networks: vec![Ok(IpNet::from(node))],
            nodes: vec![Node {
                public_key: Ok(key),
                addresses: vec![Ok(node)],
            }],
            grants: ports.map(granted).into(),
            ..Access::default()
        }],
        services: BTreeMap::from([(service.clone(), Service::Observed(observed))]),
    }
}

/// The sysctl for IPv4 forwarding, which `wg-agent prepare --mode=gateway` writes in the init container.
fn forwarding() -> Sysctl {
    Sysctl {
        name: Name::Global("ipv4/ip_forward"),
        value: 1,
        accept: [1].into(),
        write: true,
        why: "without it no packet passes the gateway",
    }
}

fn private_key(path: &PathBuf) -> anyhow::Result<StaticSecret> {
    let text = std::fs::read_to_string(path).with_context(|| format!("read {}", path.display()))?;
    let bytes = STANDARD.decode(text.trim()).context("a private key is base64")?;
    let bytes: [u8; 32] = bytes.try_into().ok().context("a private key has 32 bytes")?;
    Ok(bytes.into())
}
