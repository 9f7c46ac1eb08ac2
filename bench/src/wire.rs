//! Creates two network namespaces with a veth between them, and optionally a third as a pod; runs programs in them.
//!
//! A namespace has no name and no mount, only a file descriptor of this process. The kernel removes it when this process exits for any
//! reason, because the programs of [`End::command`] are killed then, too.

use std::{
    fs::File,
    os::fd::AsRawFd,
    process::{Child, Command, Output, Stdio},
    thread,
    time::{Duration, Instant},
};

use anyhow::{Context, bail};
use nix::sched::{CloneFlags, setns, unshare};

/// MTU of the veth, as on most networks.
const MTU: u16 = 1500;
/// Address of the pod behind the far end.
pub(crate) const POD: &str = "10.244.0.2";
/// Address of the far end in the pod's network.
const GATEWAY: &str = "10.244.0.1";
/// The longest wait for a peer or a program to be ready.
const READY_TIMEOUT: Duration = Duration::from_secs(15);

/// One end: a namespace with its half of the veth.
pub(crate) struct End {
    namespace: File,
    /// 1 or 2: the last digit of [`Self::outer`], [`Self::away`] and [`Self::inner`]. 3 for the pod, which has none of these addresses.
    pub(crate) number: u8,
}

/// The veth pair with both ends.
pub(crate) struct Wire {
    /// The near end, which sends the load, and the far end.
    pub(crate) ends: [End; 2],
}

/// A program that is killed when this is dropped.
pub(crate) struct Running {
    pub(crate) child: Child,
}

impl Wire {
    /// Creates the namespaces, and the veth between them.
    pub(crate) fn new() -> anyhow::Result<Self> {
        let wire = Self {
            ends: [End::new(1)?, End::new(2)?],
        };
        let [a, b] = &wire.ends;
        let pair = format!(
            "link add eth0 mtu {MTU} type veth peer name eth0 mtu {MTU} netns {}",
            b.path()
        );
        a.ip(&pair)?;
        for end in &wire.ends {
            end.ip(&format!("addr add {}/24 dev eth0", end.outer()))?;
            end.ip("link set eth0 up")?;
        }
        wire.ends[0].until_answered(&wire.ends[1].outer())?;
        Ok(wire)
    }

    /// Creates a pod behind the far end: a third namespace, with another veth to the far end. On that veth, the far end has the
    /// address [`GATEWAY`].
    pub(crate) fn pod(&self) -> anyhow::Result<End> {
        let pod = End::new(3)?;
        let far = &self.ends[1];
        pod.ip(&format!(
            "link add eth0 mtu {MTU} type veth peer name pod0 mtu {MTU} netns {}",
            far.path()
        ))?;
        for (end, interface, address) in [(far, "pod0", GATEWAY), (&pod, "eth0", POD)] {
            end.ip(&format!("addr add {address}/24 dev {interface}"))?;
            end.ip(&format!("link set {interface} up"))?;
        }
        far.until_answered(POD)?;
        Ok(pod)
    }

    /// Sets whether the veth accepts UDP super-packets, as a NIC with USO and a receiver with GRO do. If it does not, the kernel
    /// segments them before they enter the veth.
    pub(crate) fn set_udp_offload(&self, on: bool) -> anyhow::Result<()> {
        let state = if on { "on" } else { "off" };
        for end in &self.ends {
            end.run("ethtool", &["-K", "eth0", "tx-udp-segmentation", state])?;
        }
        Ok(())
    }
}

impl End {
    fn new(number: u8) -> anyhow::Result<Self> {
        let created = thread::spawn(|| {
            unshare(CloneFlags::CLONE_NEWNET)?;
            Ok::<_, nix::Error>(File::open("/proc/thread-self/ns/net"))
        });
        let namespace = created
            .join()
            .expect("the thread that creates a namespace")
            .context("creating a network namespace needs root (CAP_SYS_ADMIN)")?
            .context("open the new namespace")?;
        let end = Self { namespace, number };
        end.ip("link set lo up")?;
        // Without this, the kernel deletes secondary addresses together with the primary one.
        end.run(
            "sh",
            &["-ec", "echo 1 > /proc/sys/net/ipv4/conf/all/promote_secondaries"],
        )?;
        Ok(end)
    }

    /// The end's address on the veth.
    pub(crate) fn outer(&self) -> String {
        format!("192.0.2.{}", self.number)
    }

    /// The end's second address on the veth, for roaming.
    pub(crate) fn away(&self) -> String {
        format!("192.0.2.10{}", self.number)
    }

    /// The end's address inside a tunnel.
    pub(crate) fn inner(&self) -> String {
        format!("10.9.0.{}", self.number)
    }

    /// The path of the end's namespace, valid while this process runs.
    fn path(&self) -> String {
        format!("/proc/{}/fd/{}", std::process::id(), self.namespace.as_raw_fd())
    }

    /// Runs the closure on a thread in the namespace.
    pub(crate) fn enter<T: Send>(&self, inside: impl FnOnce() -> T + Send) -> T {
        thread::scope(|scope| {
            let run = scope.spawn(|| {
                setns(&self.namespace, CloneFlags::CLONE_NEWNET).expect("enter the namespace");
                inside()
            });
            run.join().unwrap_or_else(|panic| std::panic::resume_unwind(panic))
        })
    }

    /// A command that runs in the namespace, and is killed when the thread that starts it ends.
    pub(crate) fn command(&self, program: &str) -> Command {
        let mut command = Command::new("nsenter");
        command
            .arg(format!("--net={}", self.path()))
            .args(["setpriv", "--pdeathsig", "KILL", "--", program])
            .stdin(Stdio::null());
        command
    }

    /// Runs a program until it ends, with any exit code.
    pub(crate) fn output(&self, program: &str, args: &[&str]) -> anyhow::Result<Output> {
        let output = self.command(program).args(args).output();
        output.with_context(|| format!("run {program}"))
    }

    /// Runs a program that must succeed; returns its standard output.
    pub(crate) fn run(&self, program: &str, args: &[&str]) -> anyhow::Result<String> {
        let output = self.output(program, args)?;
        let text = |bytes: &[u8]| String::from_utf8_lossy(bytes).into_owned();
        if !output.status.success() {
            bail!(
                "{program} {}: {}\n{}{}",
                args.join(" "),
                output.status,
                text(&output.stdout),
                text(&output.stderr)
            );
        }
        Ok(text(&output.stdout))
    }

    /// Runs `ip` with these arguments.
    pub(crate) fn ip(&self, line: &str) -> anyhow::Result<()> {
        self.run("ip", &line.split_whitespace().collect::<Vec<_>>()).map(drop)
    }

    /// Waits until the address answers a ping; fails after [`READY_TIMEOUT`].
    pub(crate) fn until_answered(&self, address: &str) -> anyhow::Result<()> {
        // One process sends ten requests a second and exits after the first reply.
        let seconds = READY_TIMEOUT.as_secs().to_string();
        let ping = ["-n", "-q", "-i", "0.1", "-c", "1", "-w", &seconds, address];
        self.run("ping", &ping).map(drop)
    }
}

impl Running {
    /// Starts a command in the background.
    pub(crate) fn start(command: &mut Command) -> anyhow::Result<Self> {
        let child = command.spawn().with_context(|| format!("start {command:?}"))?;
        Ok(Self { child })
    }

    /// The program's process id: nsenter and setpriv replace themselves with the program.
    pub(crate) fn pid(&self) -> u32 {
        self.child.id()
    }
}

impl Drop for Running {
    fn drop(&mut self) {
        let _ = self.child.kill();
        let _ = self.child.wait();
    }
}

/// Calls `probe` until it returns a value; fails after [`READY_TIMEOUT`].
pub(crate) fn wait_for<T>(what: &str, mut probe: impl FnMut() -> Option<T>) -> anyhow::Result<T> {
    let deadline = Instant::now() + READY_TIMEOUT;
    loop {
        if let Some(value) = probe() {
            return Ok(value);
        }
        if Instant::now() >= deadline {
            bail!("waited {} s for {what}", READY_TIMEOUT.as_secs());
        }
        thread::sleep(Duration::from_millis(10));
    }
}
