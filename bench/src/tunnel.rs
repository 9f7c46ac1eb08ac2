//! Opens a tunnel over the veth with one of the programs to compare.

use std::{
    fmt::Write as _,
    io::{BufRead, BufReader, Write as _},
    os::unix::net::UnixStream,
    path::{Path, PathBuf},
    process::{ChildStdin, ChildStdout, Stdio},
    time::{Duration, Instant},
};

use anyhow::{Context, bail};
use xtask::programs::from_crates_io;

use crate::{
    compared_programs, cpu,
    wire::{End, Running, Wire, wait_for},
};

/// MTU of every tunnel: 1500 minus the overhead of WireGuard over IPv6.
pub(crate) const MTU: &str = "1420";
/// The WireGuard listen port of both ends.
pub(crate) const PORT: &str = "51820";

/// The program that forwards the packets.
#[derive(Debug, Clone, Copy, PartialEq, Eq, PartialOrd, Ord, clap::ValueEnum, serde::Serialize)]
#[serde(rename_all = "kebab-case")]
pub(crate) enum Variant {
    /// No tunnel: the upper bound of all others.
    Veth,
    /// The userspace device of this checkout.
    WgAgent,
    /// Like `WgAgent`, with `--no-offload`.
    WgAgentNoOffload,
    /// wireguard-go at the version that tools/wireguard pins.
    WireguardGo,
    /// boringtun-cli of crates.io.
    Boringtun,
    /// gotatun-cli of crates.io.
    Gotatun,
}

impl Variant {
    /// The name in the tables; for a program of another project, with the measured version.
    pub(crate) const fn name(self) -> &'static str {
        match self {
            Self::Veth => "plain veth",
            Self::WgAgent => "**wg-agent**",
            Self::WgAgentNoOffload => "wg-agent `--no-offload`",
            Self::WireguardGo => "wireguard-go (2026-05)",
            Self::Boringtun => "boringtun-cli 0.7.1",
            Self::Gotatun => "gotatun-cli 0.10.2",
        }
    }

    /// Builds the program; `None` if the variant needs none.
    pub(crate) fn build(self) -> anyhow::Result<Option<PathBuf>> {
        Ok(match self {
            Self::Veth => None,
            Self::WgAgent | Self::WgAgentNoOffload => Some(compared_programs::build_our_device()?),
            Self::WireguardGo => Some(compared_programs::build_wireguard_go()?),
            Self::Boringtun => Some(from_crates_io("boringtun-cli", "0.7.1", "boringtun-cli")?),
            Self::Gotatun => Some(from_crates_io("gotatun-cli", "0.10.2", "gotatun")?),
        })
    }

    const fn is_ours(self) -> bool {
        matches!(self, Self::WgAgent | Self::WgAgentNoOffload)
    }
}

/// A key pair for each end, as `wg genkey` and `wg pubkey` print them.
pub(crate) struct Keys {
    directory: tempfile::TempDir,
    public: [String; 2],
}

impl Keys {
    /// Creates a pair for each end.
    pub(crate) fn new(wire: &Wire) -> anyhow::Result<Self> {
        let directory = tempfile::tempdir().context("a directory for keys")?;
        let mut public = [String::new(), String::new()];
        for end in &wire.ends {
            let file = directory.path().join(end.number.to_string());
            std::fs::write(&file, end.run("wg", &["genkey"])?).context("write a key")?;
            let line = format!("wg pubkey < {}", file.display());
            end.run("sh", &["-ec", &line])?
                .trim()
                .clone_into(&mut public[usize::from(end.number) - 1]);
        }
        Ok(Self { directory, public })
    }

    pub(crate) fn private_file(&self, end: &End) -> String {
        self.directory.path().join(end.number.to_string()).display().to_string()
    }

    pub(crate) fn public(&self, end: &End) -> &str {
        &self.public[usize::from(end.number) - 1]
    }
}

/// The running program at one end of a tunnel.
pub(crate) struct Daemon {
    running: Running,
    interface: String,
    /// Standard input and output of our device, for its commands. The other programs are configured with `wg`.
    pipes: Option<(ChildStdin, BufReader<ChildStdout>)>,
}

impl Daemon {
    /// Starts the program and waits until it can be configured. Only our device starts with `peer`; the other programs get
    /// their peer in [`open_end`].
    fn start(variant: Variant, program: &Path, end: &End, keys: &Keys, peer: Option<&str>) -> anyhow::Result<Self> {
        let interface = interface(end);
        let program = program.to_str().context("a program whose path is not UTF-8")?;
        let mut command = end.command(program);
        command.stdout(Stdio::null()).stderr(Stdio::null());
        match variant {
            Variant::Veth => bail!("plain veth has no program"),
            Variant::WgAgent | Variant::WgAgentNoOffload => {
                let file = keys.private_file(end);
                command
                    .args([
                        "--interface",
                        &interface,
                        "--private-key-file",
                        &file,
                        "--listen-port",
                        PORT,
                        "--mtu",
                        MTU,
                    ])
                    .stdin(Stdio::piped())
                    .stdout(Stdio::piped())
                    .stderr(Stdio::inherit());
                if variant == Variant::WgAgentNoOffload {
                    command.arg("--no-offload");
                }
                if let Some(peer) = peer {
                    command.args(["--peer", peer]);
                }
            }
            Variant::WireguardGo => {
                command.args(["-f", &interface]);
            }
            Variant::Boringtun | Variant::Gotatun => {
                command.args(["--foreground", "--disable-drop-privileges", &interface]);
            }
        }
        let mut running = Running::start(&mut command)?;
        let pipes = running.child.stdin.take().zip(running.child.stdout.take());
        let mut daemon = Self {
            running,
            interface,
            pipes: pipes.map(|(stdin, stdout)| (stdin, BufReader::new(stdout))),
        };
        if daemon.pipes.is_some() {
            // Our device prints a line when it is ready.
            daemon.line()?;
        } else {
            let socket = daemon.socket();
            wait_for(&format!("the control socket of {program}"), || {
                UnixStream::connect(&socket).ok()
            })?;
            let file = keys.private_file(end);
            end.run(
                "wg",
                &["set", &daemon.interface, "private-key", &file, "listen-port", PORT],
            )?;
        }
        Ok(daemon)
    }

    fn socket(&self) -> PathBuf {
        Path::new("/var/run/wireguard").join(format!("{}.sock", self.interface))
    }

    /// Reads the next line of our device's output.
    fn line(&mut self) -> anyhow::Result<String> {
        let (_, output) = self.pipes.as_mut().context("a program that is not ours")?;
        let mut line = String::new();
        output.read_line(&mut line).context("read the output of our device")?;
        if line.is_empty() {
            bail!("our device has ended; see its message above");
        }
        Ok(line)
    }

    /// Sends a command to our device; returns how long it took.
    fn command(&mut self, request: &str) -> anyhow::Result<Duration> {
        let (input, _) = self.pipes.as_mut().context("a program that is not ours")?;
        writeln!(input, "{request}").context("write to our device")?;
        let line = self.line()?;
        let micros = line.trim().strip_prefix("done ").and_then(|micros| micros.parse().ok());
        micros
            .map(Duration::from_micros)
            .with_context(|| format!("our device printed {line:?}"))
    }
}

impl Drop for Daemon {
    fn drop(&mut self) {
        // A killed program cannot remove its socket.
        let _ = self.running.child.kill();
        let _ = self.running.child.wait();
        let _ = std::fs::remove_file(self.socket());
    }
}

/// A tunnel that answers pings, or the plain veth.
pub(crate) struct Tunnel {
    daemons: Vec<Daemon>,
    /// The far end's address in the tunnel, or on the wire if there is no tunnel.
    pub(crate) target: String,
}

impl Tunnel {
    /// Opens the tunnel between both ends. `program` is `None` for the plain veth.
    pub(crate) fn open(variant: Variant, program: Option<&Path>, wire: &Wire, keys: &Keys) -> anyhow::Result<Self> {
        let Some(program) = program else {
            return Ok(Self {
                daemons: Vec::new(),
                target: wire.ends[1].outer(),
            });
        };
        let mut daemons = Vec::new();
        for end in 0..2 {
            delete_interface(&wire.ends[end])?;
            let other = wire.ends[1 - end].outer();
            daemons.push(open_end(variant, program, wire, keys, end, &other)?);
        }
        let target = wire.ends[1].inner();
        wire.ends[0].until_answered(&target)?;
        Ok(Self { daemons, target })
    }

    /// Kills the process of our device at `end` and starts a new one at once, with the peer's endpoint at `other`.
    pub(crate) fn restart(
        &mut self,
        end: usize,
        program: &Path,
        wire: &Wire,
        keys: &Keys,
        other: &str,
    ) -> anyhow::Result<()> {
        // The old process must release the port first.
        drop(self.daemons.remove(end));
        let daemon = open_end(Variant::WgAgent, program, wire, keys, end, other)?;
        self.daemons.insert(end, daemon);
        Ok(())
    }

    /// The latest handshake of the device at an end, in Unix seconds.
    pub(crate) fn latest_handshake(&self, wire: &Wire, end: usize) -> anyhow::Result<Option<u64>> {
        let interface = &self.daemons[end].interface;
        let text = wire.ends[end].run("wg", &["show", interface, "latest-handshakes"])?;
        let seconds = text.split_whitespace().nth(1).and_then(|word| word.parse().ok());
        Ok(seconds.filter(|seconds| *seconds > 0))
    }

    /// The processes of the tunnel.
    pub(crate) fn pids(&self) -> Vec<u32> {
        self.daemons.iter().map(|daemon| daemon.running.pid()).collect()
    }
}

/// The name of the tunnel's interface at this end, which the program creates.
fn interface(end: &End) -> String {
    format!("bn{}x{}", std::process::id(), end.number)
}

/// Deletes the interface of our device, which remains after its process was killed.
fn delete_interface(end: &End) -> anyhow::Result<()> {
    let interface = interface(end);
    if end.output("ip", &["link", "show", "dev", &interface])?.status.success() {
        end.ip(&format!("link del {interface}"))?;
    }
    Ok(())
}

/// Opens one end of a tunnel; `other` is the outer address of the other end.
fn open_end(
    variant: Variant,
    program: &Path,
    wire: &Wire,
    keys: &Keys,
    end: usize,
    other: &str,
) -> anyhow::Result<Daemon> {
    let (end, far) = (&wire.ends[end], &wire.ends[1 - end]);
    let endpoint = format!("{other}:{PORT}");
    let allowed_ip = format!("{}/32", far.inner());
    let key = keys.public(far);
    let daemon = Daemon::start(
        variant,
        program,
        end,
        keys,
        Some(&format!("{key},{endpoint},{allowed_ip}")),
    )?;
    let interface = &daemon.interface;
    if !variant.is_ours() {
        end.run(
            "wg",
            &[
                "set",
                interface,
                "peer",
                key,
                "endpoint",
                &endpoint,
                "allowed-ips",
                &allowed_ip,
            ],
        )?;
    }
    // `replace`, because the interface of an earlier process may remain and have the address already.
    end.ip(&format!("addr replace {}/24 dev {interface}", end.inner()))?;
    end.ip(&format!("link set {interface} mtu {MTU} up"))?;
    Ok(daemon)
}

/// The cost of [`IDLE_PEERS`] peers without traffic.
#[derive(Debug, Clone, Copy, PartialEq, serde::Serialize)]
pub(crate) struct IdlePeers {
    /// Seconds to add all peers.
    pub(crate) programmed: f64,
    /// Seconds to add a network to the allowed IPs of one peer; NaN if the program refuses that.
    pub(crate) changed: f64,
    /// Bytes of memory for a thousand peers.
    pub(crate) memory_per_thousand: f64,
}

/// Number of idle peers: the largest supported mesh.
pub(crate) const IDLE_PEERS: u32 = 5_000;

/// Adds many peers to one device, and measures time and memory.
pub(crate) fn measure_idle(variant: Variant, program: &Path, wire: &Wire, keys: &Keys) -> anyhow::Result<IdlePeers> {
    let end = &wire.ends[0];
    delete_interface(end)?;
    let mut daemon = Daemon::start(variant, program, end, keys, None)?;
    let before = cpu::resident(daemon.running.pid())?;
    let (programmed, changed, after);
    if variant.is_ours() {
        programmed = daemon.command(&format!("idle {IDLE_PEERS}"))?;
        after = cpu::resident(daemon.running.pid())?;
        changed = Some(daemon.command("change")?);
    } else {
        let mut file = tempfile::NamedTempFile::new().context("a file of peers")?;
        file.write_all(configuration().as_bytes()).context("write peers")?;
        let path = file.path().to_str().context("a file whose path is not UTF-8")?;
        let timed = |args: &[&str]| -> anyhow::Result<Duration> {
            let began = Instant::now();
            end.run("wg", args)?;
            Ok(began.elapsed())
        };
        programmed = timed(&["addconf", &daemon.interface, path])?;
        after = cpu::resident(daemon.running.pid())?;
        let allowed_ips = format!("{},102.0.0.0/24", allowed_ips(17).join(","));
        // boringtun-cli cannot change an existing peer. Which of the peers is changed does not matter.
        changed = timed(&["set", &daemon.interface, "peer", &key(17), "allowed-ips", &allowed_ips]).ok();
    }
    Ok(IdlePeers {
        programmed: programmed.as_secs_f64(),
        changed: changed.map_or(f64::NAN, |took| took.as_secs_f64()),
        memory_per_thousand: after.saturating_sub(before) as f64 * 1000.0 / f64::from(IDLE_PEERS),
    })
}

/// A configuration with the peers that our device (`crates/wg-userspace/examples/device.rs`) adds for `idle`.
fn configuration() -> String {
    let mut text = String::new();
    for number in 0..IDLE_PEERS {
        // Writing to a string cannot fail.
        let _ = writeln!(
            text,
            "[Peer]\nPublicKey = {}\nAllowedIPs = {}",
            key(number),
            allowed_ips(number).join(", ")
        );
    }
    text
}

fn key(number: u32) -> String {
    let mut bytes = [7; 32];
    bytes[4..8].copy_from_slice(&number.to_le_bytes());
    base64::Engine::encode(&base64::engine::general_purpose::STANDARD, bytes)
}

fn allowed_ips(number: u32) -> [String; 3] {
    [
        (0x6400_0000 + number * 256, 24),
        (0x6540_0000 + number, 32),
        (0x6550_0000 + number, 32),
    ]
    .map(|(address, length)| format!("{}/{length}", std::net::Ipv4Addr::from(address)))
}
