//! The client for requests that write. It sends a request only while this replica may write, and gives up a request that is still in
//! flight when the permission ends. So no request is sent after another replica has become the leader, even if this process
//! delayed the request: by a new connection, by a queue, or because the process was stopped.
//!
//! Giving up a request does not undo it. What it may still do at the API server is limited: a PUT and a PATCH contain the
//! resourceVersion that was read, a DELETE has preconditions, and a POST fails if the name exists. See also [`Term::is_clean`].

use std::{future::poll_fn, pin::pin, sync::Arc, task::Poll, time::Duration};

use http::{HeaderValue, Method, Request, Response, header::USER_AGENT};
use kube::{Client, client::Body};
use tokio::time::{Instant, sleep_until};
use tower::BoxError;

#[cfg(doc)]
use super::Term;
use super::{Election, NotPermitted, Permission, fence::Fence};

/// The permission of a request in flight is extended when less than this time of the permission is left.
const EXTEND_BEFORE: Duration = Duration::from_millis(800);
/// The pause between two attempts to extend the permission.
const EXTEND_INTERVAL: Duration = Duration::from_millis(100);

/// What permits requests to one cluster.
#[derive(Clone)]
pub(crate) enum Permit {
    /// The Lease in the hub.
    Hub(Arc<Election>),
    /// The Lease in the hub, or else the one in the member.
    Member(Arc<Election>, Arc<Fence>),
}

impl Permit {
    const fn election(&self) -> &Arc<Election> {
        match self {
            Self::Hub(election) | Self::Member(election, _) => election,
        }
    }

    async fn permission(&self) -> Result<Permission, NotPermitted> {
        match self {
            Self::Hub(election) => election.held_term().map(|term| term.permission()),
            Self::Member(_, fence) => fence.permission().await,
        }
    }

    /// Waits until this permission can be extended within its term, and returns the longer one.
    async fn extend(&self, permission: Permission) -> Result<Permission, NotPermitted> {
        let mut next_attempt = permission.until - EXTEND_BEFORE;
        loop {
            sleep_until(next_attempt).await;
            let next = self.permission().await?;
            if next.term != permission.term {
                return Err(NotPermitted::Standby);
            }
            if next.until > permission.until {
                return Ok(next);
            }
            next_attempt = Instant::now() + EXTEND_INTERVAL;
        }
    }
}

/// Returns a client that sends a writing request only while `permit` permits it, and a reading one (GET, HEAD) always. Its
/// requests name this replica as the user agent, for audit logs.
pub(crate) fn guard(client: Client, permit: Permit) -> Client {
    let namespace = client.default_namespace().to_owned();
    let program = concat!(env!("CARGO_PKG_NAME"), "/", env!("CARGO_PKG_VERSION"));
    let replica = match &permit {
        Permit::Hub(election) => &election.identity,
        Permit::Member(election, _) => &election.process,
    };
    let agent = HeaderValue::from_str(&format!("{program} ({replica})"));
    let agent = agent.unwrap_or_else(|_| HeaderValue::from_static(program));
    let service = tower::service_fn(move |mut request: Request<Body>| {
        let (client, permit) = (client.clone(), permit.clone());
        request.headers_mut().insert(USER_AGENT, agent.clone());
        async move { send(client, &permit, request).await }
    });
    Client::new(service, namespace)
}

async fn send(client: Client, permit: &Permit, request: Request<Body>) -> Result<Response<Body>, BoxError> {
    if matches!(*request.method(), Method::GET | Method::HEAD) {
        return Ok(client.send(request).await?);
    }
    // Taken before the permission, so that `Election::resign` does not miss a request that has just got its permission.
    let _in_flight = permit.election().writes.token();
    let mut permission = permit.permission().await?;
    let mut response = pin!(client.send(request));
    let mut can_extend = true;
    loop {
        tokio::select! {
            biased;
            () = end_of(permission) => {
                permit.election().record_given_up();
                return Err(NotPermitted::Lapsed.into());
            }
            response = &mut response => return Ok(response?),
            extended = permit.extend(permission), if can_extend => match extended {
                Ok(extended) => permission = extended,
                // The request may still end in time.
                Err(_) => can_extend = false,
            },
        }
    }
}

/// Waits for the end of a permission. Each poll also compares the time, because the permission may have ended while the process
/// was stopped, and the timer may then fire only after other futures were polled.
async fn end_of(permission: Permission) {
    let mut timer = pin!(sleep_until(permission.until));
    poll_fn(|context| {
        if Instant::now() >= permission.until {
            return Poll::Ready(());
        }
        timer.as_mut().poll(context)
    })
    .await;
}
