//! Forwards TCP connections to another address: from a port of the host's loopback address into a network namespace
//! ([`start`]), or from an address of a node ([`serve`]).

use std::net::{Ipv4Addr, SocketAddr};

use nix::sched::{CloneFlags, setns};

/// Starts to forward and returns the port. Forwards until the process exits.
pub(super) fn start(namespace: std::fs::File, to: SocketAddr) -> anyhow::Result<u16> {
    // A socket belongs to the network namespace of the thread that creates it. So this thread creates the listening socket, and a
    // thread inside `namespace` accepts from it and creates the sockets that connect to `to`.
    let listener = std::net::TcpListener::bind((Ipv4Addr::LOCALHOST, 0))?;
    listener.set_nonblocking(true)?;
    let port = listener.local_addr()?.port();
    let (report_start, started) = std::sync::mpsc::channel();
    std::thread::spawn(move || {
        let runtime = setns(&namespace, CloneFlags::CLONE_NEWNET)
            .map_err(anyhow::Error::from)
            .and_then(|()| Ok(tokio::runtime::Builder::new_current_thread().enable_all().build()?));
        match runtime {
            Ok(runtime) => {
                let _ = report_start.send(Ok(()));
                runtime.block_on(forward_all(listener, to));
            }
            Err(error) => drop(report_start.send(Err(error))),
        }
    });
    started.recv()??;
    Ok(port)
}

/// Accepts connections at `at` and forwards them to `to`. Returns only on an error.
pub(super) fn serve(at: SocketAddr, to: SocketAddr) -> anyhow::Result<()> {
    let listener = std::net::TcpListener::bind(at)?;
    listener.set_nonblocking(true)?;
    let runtime = tokio::runtime::Builder::new_current_thread().enable_all().build()?;
    runtime.block_on(forward_all(listener, to));
    Ok(())
}

async fn forward_all(listener: std::net::TcpListener, to: SocketAddr) {
    let listener = match tokio::net::TcpListener::from_std(listener) {
        Ok(listener) => listener,
        Err(error) => return eprintln!("forward to {to}: {error}"),
    };
    loop {
        let Ok((mut near, _)) = listener.accept().await else {
            continue;
        };
        tokio::spawn(async move {
            if let Ok(mut far) = tokio::net::TcpStream::connect(to).await {
                // An error, such as a reset of one connection, closes both; nothing else can be done.
                let _ = tokio::io::copy_bidirectional(&mut near, &mut far).await;
            }
        });
    }
}
