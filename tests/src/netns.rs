//! Creates network namespaces for tests, connects them, and runs code and programs in them.
//!
//! A namespace that [`NetNs::new`] creates has no mount: only an open file descriptor keeps it, so it disappears with the test
//! process, even if the process panics or is killed. A program that runs in it is killed when its [`Running`] is dropped. While
//! a test runs, the command that [`NetNs::enter_hint`] returns opens a shell in the namespace.

use std::{
    fs::File,
    io::{Read, Write},
    net::{Shutdown, SocketAddr, TcpListener, TcpStream},
    os::fd::AsRawFd,
    process::{Child, Command, Output, Stdio},
    sync::atomic::{AtomicU32, Ordering},
    thread,
    time::{Duration, Instant},
};

use nix::sched::{CloneFlags, setns, unshare};

/// Time limit for connecting, and for each read in [`transfer`].
const IO_TIMEOUT: Duration = Duration::from_secs(60);

/// A network namespace whose loopback interface is up.
pub struct NetNs {
    /// Used only in messages.
    pub name: String,
    file: File,
}

/// A program that runs in a namespace and is killed when this is dropped.
pub struct Running {
    description: String,
    child: Child,
}

impl NetNs {
    /// Creates a namespace. Panics if the caller is not root.
    pub fn new(name: &str) -> Self {
        let opened = thread::spawn(|| {
            unshare(CloneFlags::CLONE_NEWNET)?;
            Ok::<_, nix::Error>(File::open("/proc/thread-self/ns/net"))
        })
        .join()
        .expect("the thread that creates a namespace");
        let file = match opened {
            Ok(file) => file.expect("open the new namespace"),
            Err(error) => panic!("this test creates network namespaces and needs root (CAP_SYS_ADMIN): {error}"),
        };
        let ns = Self {
            name: name.to_owned(),
            file,
        };
        ns.ip("link set lo up");
        ns
    }

    /// Opens the existing namespace at this path.
    pub fn open(name: &str, path: &std::path::Path) -> Self {
        Self {
            name: name.to_owned(),
            file: File::open(path).expect("open a network namespace"),
        }
    }

    /// A path for `ip link set .. netns` and `nsenter --net=`, valid until this `NetNs` is dropped.
    pub fn path(&self) -> String {
        format!("/proc/{}/fd/{}", std::process::id(), self.file.as_raw_fd())
    }

    /// The name of the namespace, and the command that opens a shell in it.
    pub fn enter_hint(&self) -> String {
        format!("{}: nsenter --net={}", self.name, self.path())
    }

    /// Runs the closure on a thread inside the namespace. Threads and programs that the closure starts are also inside.
    pub fn enter<T: Send>(&self, run_inside: impl FnOnce() -> T + Send) -> T {
        thread::scope(|scope| {
            let thread = scope.spawn(|| {
                setns(&self.file, CloneFlags::CLONE_NEWNET).expect("enter the namespace");
                run_inside()
            });
            thread.join().unwrap_or_else(|panic| std::panic::resume_unwind(panic))
        })
    }

    /// Runs a program to its end and returns its output.
    pub fn output(&self, program: &str, args: &[&str]) -> Output {
        self.enter(|| Command::new(program).args(args).stdin(Stdio::null()).output())
            .unwrap_or_else(|error| panic!("run {program} in {}: {error} (is it installed?)", self.name))
    }

    /// Runs a program that must succeed and returns its standard output.
    pub fn run(&self, program: &str, args: &[&str]) -> String {
        let output = self.output(program, args);
        assert!(
            output.status.success(),
            "in {}: {program} {args:?}: {}\n{}{}",
            self.name,
            output.status,
            String::from_utf8_lossy(&output.stdout),
            String::from_utf8_lossy(&output.stderr),
        );
        String::from_utf8_lossy(&output.stdout).into_owned()
    }

    /// Runs a shell line that must succeed and returns its standard output.
    pub fn sh(&self, line: &str) -> String {
        self.run("sh", &["-ec", line])
    }

    /// Runs `ip`, with its arguments in one string.
    pub fn ip(&self, line: &str) -> String {
        self.run("ip", &line.split_whitespace().collect::<Vec<_>>())
    }

    /// Runs `ip -j` and parses its JSON; no output is an empty list.
    pub fn ip_json(&self, line: &str) -> serde_json::Value {
        let text = self.ip(&format!("-j {line}"));
        serde_json::from_str(if text.trim().is_empty() { "[]" } else { &text }).expect("ip -j prints JSON")
    }

    /// Runs a script with `nft -f`, as one transaction.
    pub fn nft(&self, script: &str) {
        let mut file = tempfile::NamedTempFile::new().expect("a file");
        file.write_all(script.as_bytes()).expect("write a script");
        self.run("nft", &["-f", file.path().to_str().expect("a path")]);
    }

    /// Starts a program that runs until the returned value is dropped. It inherits the test's output.
    pub fn spawn(&self, program: &str, args: &[&str]) -> Running {
        self.spawn_command(Command::new(program).args(args).stdin(Stdio::null()))
    }

    /// Starts a prepared command inside the namespace.
    pub fn spawn_command(&self, command: &mut Command) -> Running {
        let description = format!("{command:?} in {}", self.name);
        let child = self
            .enter(|| command.spawn())
            .unwrap_or_else(|error| panic!("start {description}: {error}"));
        Running { description, child }
    }

    /// Sends one ping; `true` = it is answered within a second. For an attempt that may fail.
    pub fn pings(&self, address: &str) -> bool {
        self.output("ping", &["-n", "-c1", "-W1", address]).status.success()
    }

    /// Sends one ping; `true` = it is answered within 30 s. For a ping that must be answered, also on a loaded machine.
    pub fn pings_patiently(&self, address: &str) -> bool {
        self.output("ping", &["-n", "-c1", "-W30", address]).status.success()
    }

    /// Reads a sysctl such as `net/ipv4/ip_forward`.
    pub fn sysctl(&self, key: &str) -> String {
        self.enter(|| std::fs::read_to_string(format!("/proc/sys/{key}")))
            .expect(key)
            .trim()
            .to_owned()
    }

    /// Sets a sysctl such as `net/ipv4/ip_forward`.
    pub fn set_sysctl(&self, key: &str, value: &str) {
        self.enter(|| std::fs::write(format!("/proc/sys/{key}"), value))
            .expect(key);
    }
}

impl Running {
    /// Its process id.
    pub fn pid(&self) -> u32 {
        self.child.id()
    }

    /// The process, for its pipes.
    pub fn child(&mut self) -> &mut Child {
        &mut self.child
    }

    /// Waits until the process exits. Panics after `at_most`.
    pub fn wait(&mut self, at_most: Duration) -> std::process::ExitStatus {
        let description = self.description.clone();
        wait_for(&format!("the exit of {description}"), at_most, || {
            self.child.try_wait().expect("wait for a child")
        })
    }
}

impl Drop for Running {
    fn drop(&mut self) {
        let _ = self.child.kill();
        let _ = self.child.wait();
    }
}

/// Creates a veth pair between two namespaces. Both ends are up and have the given addresses (`10.0.0.1/24`).
pub fn veth(a: &NetNs, a_name: &str, a_addresses: &[&str], b: &NetNs, b_name: &str, b_addresses: &[&str]) {
    a.ip(&format!(
        "link add {a_name} type veth peer name {b_name} netns {}",
        b.path()
    ));
    for (ns, link, addresses) in [(a, a_name, a_addresses), (b, b_name, b_addresses)] {
        for address in addresses {
            // Duplicate address detection would keep an IPv6 address unusable for a second.
            let nodad = if address.contains(':') { " nodad" } else { "" };
            ns.ip(&format!("addr add {address} dev {link}{nodad}"));
        }
        ns.ip(&format!("link set {link} up"));
    }
}

/// An interface name that no other test on this machine uses at the same time: a WireGuard control socket has this name in a
/// directory that all network namespaces share. The prefix may have up to 4 letters, because a name has at most 15.
pub fn unique_name(prefix: &str) -> String {
    static NEXT: AtomicU32 = AtomicU32::new(0);
    format!(
        "{prefix}{}x{}",
        std::process::id(),
        NEXT.fetch_add(1, Ordering::Relaxed)
    )
}

/// Polls every 10 ms until there is a value. Panics with `what` after `at_most`. The last poll starts after this time, so a stall of this
/// process hides no value.
pub fn wait_for<T>(what: &str, at_most: Duration, mut poll: impl FnMut() -> Option<T>) -> T {
    let deadline = Instant::now() + at_most;
    loop {
        let is_last = Instant::now() >= deadline;
        if let Some(value) = poll() {
            return value;
        }
        assert!(!is_last, "waited {at_most:?} for {what}");
        thread::sleep(Duration::from_millis(10));
    }
}

/// Waits until the condition is true. Panics with `what` after `at_most`.
pub fn wait_until(what: &str, at_most: Duration, mut condition: impl FnMut() -> bool) {
    wait_for(what, at_most, || condition().then_some(()));
}

/// Sends `bytes` bytes over one TCP connection to `address` in namespace `to`. The receiver checks the data, the sender the
/// number of bytes that the receiver reports.
pub fn transfer(from: &NetNs, to: &NetNs, address: &str, bytes: usize) {
    let address: SocketAddr = address.parse().expect("an address");
    let listener = to.enter(|| TcpListener::bind(address)).expect("listen");
    thread::scope(|scope| {
        let received = scope.spawn(move || {
            let (mut stream, _) = listener.accept().expect("accept");
            stream.set_read_timeout(Some(IO_TIMEOUT)).expect("set a timeout");
            let mut buffer = vec![0; 1 << 16];
            let mut total = 0_usize;
            loop {
                let length = stream.read(&mut buffer).expect("read");
                if length == 0 {
                    break;
                }
                assert!(
                    buffer[..length]
                        .iter()
                        .zip(total..)
                        .all(|(byte, at)| *byte == (at % 251) as u8),
                    "the received data differs from the sent data"
                );
                total += length;
            }
            stream.write_all(&(total as u64).to_be_bytes()).expect("answer");
        });
        let mut stream = from
            .enter(|| TcpStream::connect_timeout(&address, IO_TIMEOUT))
            .expect("connect");
        stream.set_read_timeout(Some(IO_TIMEOUT)).expect("set a timeout");
        let data: Vec<u8> = (0..bytes).map(|at| (at % 251) as u8).collect();
        stream.write_all(&data).expect("write");
        stream.shutdown(Shutdown::Write).expect("shut down");
        let mut answer = [0; 8];
        stream.read_exact(&mut answer).expect("an answer");
        assert_eq!(u64::from_be_bytes(answer), bytes as u64);
        received.join().expect("the receiver");
    });
}
