//! A program in the lab's test image: small servers and clients that report which client reached which server. It
//! uses only the standard library and no code of the product.

use std::collections::BTreeSet;
use std::io::{BufRead, BufReader, Read, Write};
use std::net::{IpAddr, SocketAddr, TcpListener, TcpStream, ToSocketAddrs, UdpSocket};
use std::sync::Mutex;
use std::sync::atomic::{AtomicUsize, Ordering};
use std::time::{Duration, Instant, SystemTime, UNIX_EPOCH};

const USAGE: &str = "usage:
  lab-probe serve ADDRESS              HTTP: answers with its own name and the client's address
  lab-probe get URL..                  one GET each, 3 s to connect and for each read; exit status 1 if any fails
  lab-probe udp-echo ADDRESS           sends every datagram back, with the sender's address before it
  lab-probe udp-echo-at PORT IP,IP..   the same at each of these addresses; a reply comes from the address that got the datagram
  lab-probe udp-send ADDRESS TEXT [N]  sends N datagrams (default 1), waits 30 s for each echo; exit status 1 if any is lost
  lab-probe udp-talk PORT SECONDS ADDRESS.. sends a datagram from PORT to each ADDRESS every 100 ms; prints each datagram once, with its sender
  lab-probe udp-watch ADDRESS          sends a datagram each 10 ms; prints the time of each echo within 1 s, in milliseconds since 1970
  lab-probe udp-trips ADDRESS SECONDS  sends a datagram, waits for its echo, repeats; prints each round trip in microseconds
  lab-probe stream-serve ADDRESS       TCP: echoes lines
  lab-probe stream-get ADDRESS SECONDS LIMIT one connection, a line 100 ms after each echo; prints round trips; fails if one takes over LIMIT s
  lab-probe stream-watch ADDRESS       one connection, a line 20 ms after each echo; prints the time of each echo, in milliseconds since 1970
  lab-probe connect-watch ADDRESS      a new TCP connection each 20 ms; prints its start and when it is established, in milliseconds since 1970
  lab-probe scan FILE                  TCP connections to every ADDRESS in FILE, 1 s timeout; prints those that are open
  lab-probe scan-udp FILE              up to 3 datagrams to every ADDRESS in FILE within 1 s; prints those that answer
  lab-probe scan-on FILE               repeats scan forever: prints each ADDRESS when it first opens, and each round
  lab-probe pause                      waits forever
ADDRESS is host:port, but IP:port in a FILE and for udp-talk, udp-trips and connect-watch; a server listens on all addresses for :port.";
const TIMEOUT: Duration = Duration::from_secs(3);
/// A stream is opened only once, so its SYN may be retransmitted for this long.
const STREAM_TIMEOUT: Duration = Duration::from_secs(60);

type Outcome = Result<(), Box<dyn std::error::Error>>;

fn main() {
    let words: Vec<String> = std::env::args().skip(1).collect();
    let words: Vec<&str> = words.iter().map(String::as_str).collect();
    let outcome = match words[..] {
        ["serve", address] => serve(address),
        ["get", ref urls @ ..] if !urls.is_empty() => get_all(urls),
        ["udp-echo", address] => udp_echo(address),
        ["udp-echo-at", port, addresses] => udp_echo_at(port, addresses),
        ["udp-send", address, text] => udp_send(address, text, 1),
        ["udp-send", address, text, count] => count
            .parse()
            .map_err(Into::into)
            .and_then(|n| udp_send(address, text, n)),
        ["udp-talk", port, seconds, ref addresses @ ..] => udp_talk(port, seconds, addresses),
        ["udp-watch", address] => udp_watch(address),
        ["udp-trips", address, seconds] => seconds.parse().map_err(Into::into).and_then(|s| udp_trips(address, s)),
        ["stream-serve", address] => stream_serve(address),
        ["stream-get", address, seconds, limit] => stream_get(address, seconds, limit),
        ["stream-watch", address] => stream_watch(address),
        ["connect-watch", address] => connect_watch(address),
        ["scan", file] => scan(file, |address| {
            TcpStream::connect_timeout(address, SCAN_TIMEOUT).is_ok()
        }),
        ["scan-on", file] => scan_repeatedly(file),
        ["scan-udp", file] => scan(file, |address| echoes(address).is_ok()),
        ["pause"] => loop {
            std::thread::park();
        },
        _ => Err(USAGE.into()),
    };
    if let Err(error) = outcome {
        eprintln!("{error}");
        std::process::exit(1);
    }
}

/// Replaces a missing host (`:8080`) by the wildcard address of both families.
fn bind_address(address: &str) -> String {
    if address.starts_with(':') {
        format!("[::]{address}")
    } else {
        address.into()
    }
}

/// Converts an IPv4-mapped IPv6 address to IPv4.
fn unmap(address: SocketAddr) -> SocketAddr {
    SocketAddr::new(address.ip().to_canonical(), address.port())
}

fn host() -> String {
    std::fs::read_to_string("/proc/sys/kernel/hostname")
        .unwrap_or_default()
        .trim()
        .into()
}

fn serve(address: &str) -> Outcome {
    let listener = TcpListener::bind(bind_address(address))?;
    println!("serving on {}", listener.local_addr()?);
    for stream in listener.incoming().flatten() {
        std::thread::spawn(move || answer_http(stream));
    }
    Ok(())
}

fn answer_http(mut stream: TcpStream) -> std::io::Result<()> {
    stream.set_read_timeout(Some(TIMEOUT))?;
    let mut reader = BufReader::new(stream.try_clone()?);
    let mut line = String::new();
    // The empty line (CR LF) ends the header.
    while reader.read_line(&mut line)? > 2 {
        line.clear();
    }
    let node = std::env::var("NODE").unwrap_or_default();
    let body = format!("hello from {} on {node} to {}\n", host(), unmap(stream.peer_addr()?));
    let length = body.len();
    write!(
        stream,
        "HTTP/1.1 200 OK\r\nContent-Type: text/plain\r\nContent-Length: {length}\r\nConnection: close\r\n\r\n{body}"
    )
}

fn get_all(urls: &[&str]) -> Outcome {
    let mut failed = 0;
    for url in urls {
        match get(url) {
            Ok(body) => println!("{url} {}", body.trim()),
            Err(error) => {
                println!("{url} {error}");
                failed += 1;
            }
        }
    }
    if failed > 0 {
        Err(format!("{failed} of {} failed", urls.len()).into())
    } else {
        Ok(())
    }
}

fn get(url: &str) -> Result<String, Box<dyn std::error::Error>> {
    let rest = url.strip_prefix("http://").ok_or("only http:// is supported")?;
    let (authority, path) = rest.split_once('/').unwrap_or((rest, ""));
    let has_port = authority
        .rsplit_once(':')
        .is_some_and(|(_, port)| port.parse::<u16>().is_ok());
    let mut stream = dial(&if has_port {
        authority.into()
    } else {
        format!("{authority}:80")
    })?;
    write!(
        stream,
        "GET /{path} HTTP/1.1\r\nHost: {authority}\r\nConnection: close\r\n\r\n"
    )?;
    let mut answer = String::new();
    stream.read_to_string(&mut answer)?;
    let (head, body) = answer.split_once("\r\n\r\n").ok_or("the answer has no HTTP header")?;
    let status = head.split(' ').nth(1).unwrap_or("no status");
    if status == "200" {
        Ok(format!("{status} {body}"))
    } else {
        Err(format!("status {status}: {body}").into())
    }
}

/// Number of scanner threads. It is high, because most attempts wait for the timeout.
const SCANNERS: usize = 512;
/// The timeout of each attempt.
const SCAN_TIMEOUT: Duration = Duration::from_secs(1);

fn scan(file: &str, is_open: impl Fn(&SocketAddr) -> bool + Sync) -> Outcome {
    for_each_parallel(&sockets(file)?, |address| {
        if is_open(address) {
            println!("{address}");
        }
    });
    Ok(())
}

fn scan_repeatedly(file: &str) -> Outcome {
    let all = sockets(file)?;
    let opened = Mutex::new(BTreeSet::new());
    for round in 1_u64.. {
        for_each_parallel(&all, |address| {
            if TcpStream::connect_timeout(address, SCAN_TIMEOUT).is_ok()
                && opened.lock().is_ok_and(|mut opened| opened.insert(*address))
            {
                println!("open {address}");
            }
        });
        println!("round {round}");
    }
    Ok(())
}

fn sockets(file: &str) -> Result<Vec<SocketAddr>, Box<dyn std::error::Error>> {
    let text = std::fs::read_to_string(file)?;
    Ok(text.lines().map(str::parse).collect::<Result<_, _>>()?)
}

fn for_each_parallel(all: &[SocketAddr], probe: impl Fn(&SocketAddr) + Sync) {
    let next = AtomicUsize::new(0);
    std::thread::scope(|scope| {
        for _ in 0..SCANNERS.min(all.len()) {
            scope.spawn(|| {
                while let Some(address) = all.get(next.fetch_add(1, Ordering::Relaxed)) {
                    probe(address);
                }
            });
        }
    });
}

/// Waits for an echo. Sends up to three datagrams, because a loaded machine may drop one.
fn echoes(address: &SocketAddr) -> std::io::Result<()> {
    let socket = UdpSocket::bind(bind_address(if address.is_ipv4() { "0.0.0.0:0" } else { ":0" }))?;
    socket.connect(address)?;
    socket.set_read_timeout(Some(SCAN_TIMEOUT / 3))?;
    let mut answer = Err(std::io::ErrorKind::TimedOut.into());
    for _ in 0..3 {
        socket.send(b"scan")?;
        answer = socket.recv(&mut [0; 512]).map(drop);
        if answer.is_ok() {
            break;
        }
    }
    answer
}

fn dial(address: &str) -> Result<TcpStream, Box<dyn std::error::Error>> {
    dial_within(address, TIMEOUT)
}

/// The timeout applies to the connection and to each read.
fn dial_within(address: &str, timeout: Duration) -> Result<TcpStream, Box<dyn std::error::Error>> {
    let mut last = format!("{address} resolves to no address").into();
    for target in address.to_socket_addrs()? {
        match TcpStream::connect_timeout(&target, timeout) {
            Ok(stream) => {
                stream.set_read_timeout(Some(timeout))?;
                return Ok(stream);
            }
            Err(error) => last = error.into(),
        }
    }
    Err(last)
}

fn udp_echo(address: &str) -> Outcome {
    let socket = UdpSocket::bind(bind_address(address))?;
    println!("echoing on {}", socket.local_addr()?);
    let mut buffer = [0; 65536];
    loop {
        let (length, from) = socket.recv_from(&mut buffer)?;
        let reply = [format!("{} ", unmap(from)).as_bytes(), &buffer[..length]].concat();
        // An error for one client must not stop the server.
        let _ = socket.send_to(&reply, from);
    }
}

fn udp_echo_at(port: &str, addresses: &str) -> Outcome {
    let port: u16 = port.parse()?;
    let addresses: Vec<IpAddr> = addresses.split(',').map(str::parse).collect::<Result<_, _>>()?;
    std::thread::scope(|scope| {
        let echo_at =
            |address| move || udp_echo(&SocketAddr::new(address, port).to_string()).map_err(|error| error.to_string());
        let servers: Vec<_> = addresses
            .into_iter()
            .map(|address| scope.spawn(echo_at(address)))
            .collect();
        for server in servers {
            server.join().map_err(|_| "a server ended")??;
        }
        Ok(())
    })
}

fn udp_send(address: &str, text: &str, count: u32) -> Outcome {
    let target = address.to_socket_addrs()?.next().ok_or("no such address")?;
    let socket = UdpSocket::bind(if target.is_ipv4() { "0.0.0.0:0" } else { "[::]:0" })?;
    socket.connect(target)?;
    socket.set_read_timeout(Some(Duration::from_secs(30)))?;
    let mut buffer = [0; 65536];
    let mut lost = 0;
    for _ in 0..count {
        // An ICMP error for an earlier datagram is reported by the next call, and counts as a loss.
        match socket.send(text.as_bytes()).and_then(|_| socket.recv(&mut buffer)) {
            Ok(length) => println!("{}", String::from_utf8_lossy(&buffer[..length])),
            Err(_) => lost += 1,
        }
    }
    if lost > 0 {
        Err(format!("{lost} of {count} lost").into())
    } else {
        Ok(())
    }
}

/// Each datagram contains the local port as text. Prints `bound` once the socket is bound.
fn udp_talk(port: &str, seconds: &str, addresses: &[&str]) -> Outcome {
    let addresses: Vec<SocketAddr> = addresses
        .iter()
        .map(|address| address.parse())
        .collect::<Result<_, _>>()?;
    let socket = UdpSocket::bind(("0.0.0.0", port.parse()?))?;
    socket.set_read_timeout(Some(Duration::from_millis(100)))?;
    println!("bound");
    let end = Instant::now() + Duration::from_secs(seconds.parse()?);
    let (mut seen, mut buffer) = (BTreeSet::new(), [0; 65536]);
    while Instant::now() < end {
        for address in &addresses {
            // The error of one datagram is ignored, because a later one may pass.
            let _ = socket.send_to(port.as_bytes(), address);
        }
        let round = Instant::now() + Duration::from_millis(100);
        while Instant::now() < round {
            let Ok((length, sender)) = socket.recv_from(&mut buffer) else {
                break;
            };
            let line = format!("{sender} {}", String::from_utf8_lossy(&buffer[..length]));
            if seen.insert(line.clone()) {
                println!("{line}");
            }
        }
    }
    Ok(())
}

/// An echo that arrives late is not printed: if a process was stopped, the echo does not show whether the path is open now.
fn udp_watch(address: &str) -> Outcome {
    let target = address.to_socket_addrs()?.next().ok_or("no such address")?;
    let socket = UdpSocket::bind(bind_address(if target.is_ipv4() { "0.0.0.0:0" } else { ":0" }))?;
    socket.connect(target)?;
    let (sender, start) = (socket.try_clone()?, Instant::now());
    std::thread::spawn(move || {
        loop {
            // The error of one datagram is ignored, because a later one may pass.
            let _ = sender.send(start.elapsed().as_millis().to_string().as_bytes());
            std::thread::sleep(Duration::from_millis(10));
        }
    });
    let mut buffer = [0; 512];
    loop {
        let Ok(length) = socket.recv(&mut buffer) else {
            continue;
        };
        let at = now()?;
        // The echo contains the sender's address before the text.
        let text = String::from_utf8_lossy(&buffer[..length]);
        let sent: Option<u128> = text.rsplit(' ').next().and_then(|sent| sent.parse().ok());
        if sent.is_some_and(|sent| start.elapsed().as_millis() <= sent + 1000) {
            println!("{at}");
        }
    }
}

/// Measures round trips. A round trip that takes longer than `TIMEOUT` is not printed.
fn udp_trips(address: &str, seconds: f64) -> Outcome {
    let target: SocketAddr = address.parse()?;
    let socket = UdpSocket::bind(bind_address(if target.is_ipv4() { "0.0.0.0:0" } else { ":0" }))?;
    socket.connect(target)?;
    socket.set_read_timeout(Some(TIMEOUT))?;
    let mut round_trips = Vec::new();
    let start = Instant::now();
    for number in 0_u64.. {
        if start.elapsed().as_secs_f64() >= seconds {
            break;
        }
        let sent = Instant::now();
        let text = number.to_string();
        let mut buffer = [0; 512];
        socket.send(text.as_bytes())?;
        // The echo contains the sender's address before the text. Late echoes of earlier datagrams are skipped.
        while let Ok(length) = socket.recv(&mut buffer) {
            if buffer[..length].ends_with(format!(" {text}").as_bytes()) {
                round_trips.push(sent.elapsed().as_micros());
                break;
            }
        }
    }
    // Printed at the end, because printing would change the measurement.
    for trip in round_trips {
        println!("{trip}");
    }
    Ok(())
}

/// Prints `lost` for a connection that fails or is not established within `TIMEOUT`.
fn connect_watch(address: &str) -> Outcome {
    let target: SocketAddr = address.parse()?;
    loop {
        let began = now()?;
        std::thread::spawn(move || {
            let opened = TcpStream::connect_timeout(&target, TIMEOUT).is_ok();
            match now() {
                Ok(now) if opened => println!("{began} {now}"),
                _ => println!("{began} lost"),
            }
        });
        std::thread::sleep(Duration::from_millis(20));
    }
}

/// Waits for each echo without a timeout, as long as the connection exists.
fn stream_watch(address: &str) -> Outcome {
    let mut stream = dial_within(address, STREAM_TIMEOUT)?;
    stream.set_nodelay(true)?;
    stream.set_read_timeout(None)?;
    let mut reader = BufReader::new(stream.try_clone()?);
    let mut line = String::new();
    loop {
        writeln!(stream, "watch")?;
        line.clear();
        if reader.read_line(&mut line)? == 0 {
            return Err("the connection was closed".into());
        }
        println!("{}", now()?);
        std::thread::sleep(Duration::from_millis(20));
    }
}

/// Milliseconds since 1970.
fn now() -> Result<u128, std::time::SystemTimeError> {
    Ok(SystemTime::now().duration_since(UNIX_EPOCH)?.as_millis())
}

fn stream_serve(address: &str) -> Outcome {
    let listener = TcpListener::bind(bind_address(address))?;
    println!("streaming on {}", listener.local_addr()?);
    for stream in listener.incoming().flatten() {
        std::thread::spawn(move || -> std::io::Result<()> {
            let mut writer = stream.try_clone()?;
            for line in BufReader::new(stream).lines() {
                writer.write_all(format!("{}\n", line?).as_bytes())?;
            }
            Ok(())
        });
    }
    Ok(())
}

fn stream_get(address: &str, seconds: &str, limit: &str) -> Outcome {
    let seconds: f64 = seconds.parse()?;
    let mut stream = dial_within(address, STREAM_TIMEOUT)?;
    stream.set_nodelay(true)?;
    stream.set_read_timeout(Some(Duration::from_secs(limit.parse()?)))?;
    let mut reader = BufReader::new(stream.try_clone()?);
    let start = Instant::now();
    let mut number = 0u64;
    let mut line = String::new();
    while start.elapsed().as_secs_f64() < seconds {
        number += 1;
        writeln!(stream, "{number}")?;
        line.clear();
        let sent = Instant::now();
        reader
            .read_line(&mut line)
            .map_err(|error| format!("no echo of line {number}: {error}"))?;
        if line.trim() != number.to_string() {
            return Err(format!("line {number} came back as {line:?}").into());
        }
        println!("{number} after {} ms", sent.elapsed().as_millis());
        std::thread::sleep(Duration::from_millis(100));
    }
    Ok(())
}
