//! Runs one device with the peers of its arguments. The caller sets the interface's addresses. `cargo xtask bench` measures this program.
//!
//! The device is removed when standard input closes. Until then each line is a command: `idle N` adds N peers without traffic, `change`
//! adds a network to the allowed IPs of the 18th of them. The program answers each command with `done` and its duration in microseconds.
//!
//! ```text
//! cargo run -p wg-userspace --example device -- --interface wg1 --private-key-file key1 --listen-port 51820 --peer KEY,192.0.2.2:51820,10.9.0.2/32
//! ```

use std::{
    collections::BTreeSet,
    io::{BufRead, Write},
    net::SocketAddr,
    path::{Path, PathBuf},
    str::FromStr,
    time::Instant,
};

use anyhow::{Context, bail};
use clap::Parser;
use ipnet::{IpNet, Ipv4Net};
use wg_userspace::{
    Configuration, Device, Interface, Options, PeerChange, PeerSpec, PeerUpdate, PrivateKey, PublicKey,
};

#[derive(Debug, Parser)]
struct Args {
    #[arg(long)]
    interface: String,
    /// A file with the private key, as `wg genkey` prints it.
    #[arg(long)]
    private_key_file: PathBuf,
    #[arg(long, default_value_t = 0)]
    listen_port: u16,
    #[arg(long, default_value_t = 1420)]
    mtu: u16,
    /// Use no offload, as on a kernel without it.
    #[arg(long)]
    no_offload: bool,
    /// KEY,ENDPOINT,ALLOWED_IP[,ALLOWED_IP...]
    #[arg(long)]
    peer: Vec<Peer>,
}

#[derive(Debug, Clone)]
struct Peer(PublicKey, PeerSpec);

impl FromStr for Peer {
    type Err = anyhow::Error;

    fn from_str(text: &str) -> anyhow::Result<Self> {
        let mut words = text.split(',');
        let key = words.next().unwrap_or_default().parse()?;
        let endpoint: SocketAddr = words.next().context("no endpoint after the key")?.parse()?;
        let allowed_ips: BTreeSet<IpNet> = words.map(str::parse).collect::<Result<_, _>>()?;
        let spec = PeerSpec {
            endpoint: Some(endpoint),
            allowed_ips,
            ..PeerSpec::default()
        };
        Ok(Self(key, spec))
    }
}

fn main() -> anyhow::Result<()> {
    let Args {
        interface,
        private_key_file,
        listen_port,
        mtu,
        no_offload,
        peer,
    } = Args::parse();
    let configuration = Configuration {
        private_key: private_key(&private_key_file)?,
        listen_port,
        fwmark: 0,
        mtu,
    };
    let options = Options {
        offload: !no_offload,
        ..Options::default()
    };
    let interface = Interface {
        name: &interface,
        alias: "wg-userspace example",
    };
    let mut device = Device::open(interface, configuration, options)?;
    let peers: Vec<_> = peer
        .into_iter()
        .map(|Peer(key, spec)| PeerChange::Add(key, spec))
        .collect();
    device.apply(&peers);
    println!("ready");
    for line in std::io::stdin().lock().lines() {
        let line = line?;
        let changes = match line.split_whitespace().collect::<Vec<_>>()[..] {
            ["idle", count] => (0..count.parse()?).map(idle).collect(),
            ["change"] => vec![change()],
            _ => bail!("{line:?} is neither `idle N` nor `change`"),
        };
        let began = Instant::now();
        device.apply(&changes);
        println!("done {}", began.elapsed().as_micros());
        std::io::stdout().flush()?;
    }
    Ok(device.close()?)
}

fn private_key(path: &Path) -> anyhow::Result<PrivateKey> {
    let text = std::fs::read_to_string(path).with_context(|| format!("read {}", path.display()))?;
    text.trim().parse().with_context(|| format!("read {}", path.display()))
}

/// A public key for each number. Any 32 bytes are accepted as a key.
fn key(number: u32) -> PublicKey {
    let mut bytes = [7; 32];
    bytes[4..8].copy_from_slice(&number.to_le_bytes());
    PublicKey::new(bytes)
}

/// As many allowed IPs as the Peer of a node in a mesh has: pod CIDR, InternalIP and WireGuard address.
fn allowed_ips(number: u32) -> BTreeSet<IpNet> {
    [
        (0x6400_0000 + number * 256, 24),
        (0x6540_0000 + number, 32),
        (0x6550_0000 + number, 32),
    ]
    .map(|(address, length)| Ipv4Net::new_assert(address.into(), length).into())
    .into()
}

fn idle(number: u32) -> PeerChange {
    let spec = PeerSpec {
        allowed_ips: allowed_ips(number),
        ..PeerSpec::default()
    };
    PeerChange::Add(key(number), spec)
}

fn change() -> PeerChange {
    let update = PeerUpdate {
        add_allowed_ips: [Ipv4Net::new_assert([102, 0, 0, 0].into(), 24).into()].into(),
        ..PeerUpdate::default()
    };
    PeerChange::Update(key(17), update)
}
