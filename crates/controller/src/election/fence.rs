//! The Lease in a member that the leader takes before its first write there.
//!
//! While the leader holds the hub's Lease, it does not renew this one, so it costs a member one write for each leader. If the leader
//! cannot renew the hub's Lease, because the hub does not answer or only this replica is cut off, it goes on writing into a member as long
//! as it can renew the Lease there. Only a replica that holds the hub's Lease may take the Lease of a member from another. So if there is a
//! new leader that reaches the member, the old one cannot renew; if there is none, or it does not reach the member, the old one goes on.

use std::{sync::Arc, time::Duration};

use clustermesh_api::names::{LABEL_HUB, lease_name};
use k8s_openapi::{
    api::coordination::v1::{Lease, LeaseSpec},
    jiff::Timestamp,
};
use kube::{Api, Client, Error, ResourceExt};
use tokio::{
    sync::Mutex,
    time::{Instant, sleep, sleep_until},
};

use super::{
    Election, NotPermitted, Permission, Term,
    lease::{holder, with_holder, within, write},
};
use crate::api_error;

/// The namespace of the Lease, in which `deploy/member-account.yaml` gives the controller the right to write it.
const NAMESPACE: &str = "clustermesh";
/// After a renewal was sent, writes into the member are permitted for this long.
const VALIDITY: Duration = Duration::from_secs(2);
/// How long a new leader waits after it has taken the Lease from a replica that has renewed it. It is longer than [`VALIDITY`], so that
/// the last requests of that replica have ended.
const WAIT: Duration = Duration::from_millis(2_500);
const REQUEST_TIMEOUT: Duration = Duration::from_secs(5);
/// The pause after a failed attempt to take the Lease.
const RETRY_INTERVAL: Duration = Duration::from_secs(1);
/// An API server that has just started denies everything until it has loaded its RBAC roles. A new leader whose predecessor may still
/// write does not write without the Lease until the Lease was denied for this long.
const DENIED_AFTER: Duration = Duration::from_secs(60);
/// When the member does not permit the Lease, it is tried again after this time.
const REFUSED_FOR: Duration = Duration::from_secs(300);

/// The Lease for one connection to a member. Two connections to the same cluster, by different Secrets, share one Lease.
pub(crate) struct Fence {
    election: Arc<Election>,
    /// For logs.
    member: String,
    leases: Api<Lease>,
    name: String,
    hub: String,
    state: Mutex<State>,
    /// Taken by the task that takes the Lease.
    taking: Mutex<()>,
}

#[derive(Default)]
struct State {
    /// The number of the term in which the member may be written, because this replica has taken the Lease or the member does not permit
    /// it.
    ready: Option<u64>,
    /// The Lease after our last write. `None` = it was not read yet, or another process has changed it.
    lease: Option<Lease>,
    /// When the last successful renewal was sent.
    renewed: Option<Instant>,
    /// The member does not permit the Lease; until when it is not tried again.
    refused_until: Option<Instant>,
}

impl Fence {
    pub(crate) fn new(election: Arc<Election>, member: String, hub: &str, client: Client) -> Self {
        Self {
            election,
            member,
            leases: Api::namespaced(client, NAMESPACE),
            name: lease_name(hub),
            hub: hub.to_owned(),
            state: Mutex::default(),
            taking: Mutex::default(),
        }
    }

    /// Whether the leader has to take the Lease before it may write. False for other replicas.
    pub(crate) fn must_be_taken(&self) -> bool {
        let Ok(term) = self.election.held_term() else {
            return false;
        };
        // While the state is locked, this replica takes the Lease.
        self.state.try_lock().map_or(true, |state| {
            state.ready != Some(term.number) || state.refused_until.is_some_and(|until| Instant::now() > until)
        })
    }

    /// Takes the Lease, and waits until the member may be written. Tries until it succeeds or the term ends. Returns at once if another
    /// call is doing this.
    pub(crate) async fn take(&self) {
        let Ok(_taking) = self.taking.try_lock() else { return };
        while let Ok(term) = self.election.held_term() {
            match self.try_take(&term).await {
                Ok(()) => return,
                Err(why) => {
                    tracing::debug!(member = self.member, why, "the Lease in the member is not taken yet");
                    sleep(RETRY_INTERVAL).await;
                }
            }
        }
    }

    async fn try_take(&self, term: &Term) -> Result<(), String> {
        let identity = &self.election.identity;
        let current = match within(REQUEST_TIMEOUT, self.leases.get_opt(&self.name)).await {
            Ok(current) => current,
            Err(error) => return self.write_without(term, &error).await,
        };
        let previous = current.as_ref().and_then(holder).cloned();
        let now = Instant::now();
        let (lease, valid_from) = match current {
            // Taken in an earlier term, by an earlier connection, or by one with another Secret.
            Some(lease) if previous.as_ref() == Some(identity) => {
                let rest = WAIT.saturating_sub(time_since_taken(&lease));
                (lease, now + rest)
            }
            current => {
                let mut lease = with_holder(current.as_ref(), &self.name, identity);
                lease.labels_mut().insert(LABEL_HUB.to_owned(), self.hub.clone());
                // Nobody takes it because of its age.
                lease.spec.get_or_insert_default().lease_duration_seconds = None;
                // If this replica was stopped since it read the Lease, a new leader may hold it now.
                if self.election.held_term().map(|held| held.number) != Ok(term.number) {
                    return Err("this replica is not the leader any more".to_owned());
                }
                let lease = match write(&self.leases, &lease, REQUEST_TIMEOUT).await {
                    Ok(lease) => lease,
                    Err(error) => return self.write_without(term, &error).await,
                };
                // The last holder writes only if it has renewed the Lease, or holds the hub's, which is impossible now.
                let may_write =
                    current.as_ref().is_some_and(was_renewed) && previous.is_some() && previous != term.released_by;
                (lease, if may_write { Instant::now() + WAIT } else { now })
            }
        };
        sleep_until(valid_from).await;
        *self.state.lock().await = State {
            ready: Some(term.number),
            lease: Some(lease),
            ..State::default()
        };
        Ok(())
    }

    /// Permits writes without the Lease, if the member does not permit the Lease.
    async fn write_without(&self, term: &Term, error: &Error) -> Result<(), String> {
        match error {
            Error::Api(status) if status.code == 403 || status.code == 404 => {
                let may_be_starting = status.code == 403 && !term.is_clean && term.began.elapsed() < DENIED_AFTER;
                if may_be_starting {
                    return Err(api_error::describe(error));
                }
                tracing::warn!(
                    member = self.member,
                    code = status.code,
                    "the member does not permit the Lease {NAMESPACE}/{}, so nothing is written there while the hub does not answer; apply \
                     deploy/member-account.yaml in it",
                    self.name,
                );
                *self.state.lock().await = State {
                    ready: Some(term.number),
                    refused_until: Some(Instant::now() + REFUSED_FOR),
                    ..State::default()
                };
                Ok(())
            }
            _ => Err(api_error::describe(error)),
        }
    }

    /// Returns the permission to write into the member. Renews the Lease if this replica cannot renew the one in the hub.
    ///
    /// # Errors
    /// This replica may not write into the member now.
    pub(super) async fn permission(&self) -> Result<Permission, NotPermitted> {
        let mut state = self.state.lock().await;
        match self.election.held_term() {
            Ok(term) if state.ready == Some(term.number) => Ok(term.permission()),
            Ok(_) => Err(NotPermitted::NotTaken),
            Err(NotPermitted::Lapsed) => self.renew(&mut state).await,
            Err(why) => Err(why),
        }
    }

    /// Renews the Lease, unless it was renewed a short time ago.
    async fn renew(&self, state: &mut State) -> Result<Permission, NotPermitted> {
        let identity = &self.election.identity;
        let member_error = |error: &Error| NotPermitted::Member(api_error::describe(error));
        if state.renewed.is_none_or(|sent| sent.elapsed() > VALIDITY / 2) {
            let current = match state.lease.take() {
                Some(lease) => lease,
                None => {
                    let current = within(REQUEST_TIMEOUT, self.leases.get_opt(&self.name)).await;
                    let current = current.map_err(|error| member_error(&error))?;
                    let current = current.filter(|lease| holder(lease) == Some(identity));
                    current.ok_or(NotPermitted::Taken)?
                }
            };
            let sent = Instant::now();
            let lease = with_holder(Some(&current), &self.name, identity);
            match write(&self.leases, &lease, REQUEST_TIMEOUT).await {
                Ok(lease) => (state.lease, state.renewed) = (Some(lease), Some(sent)),
                // Another replica has taken it, or another connection of this process has renewed it. The next attempt reads it.
                Err(Error::Api(status)) if matches!(status.code, 404 | 409) => return Err(NotPermitted::Taken),
                Err(error) => return Err(member_error(&error)),
            }
        }
        let until = state
            .renewed
            .map(|sent| sent + VALIDITY)
            .filter(|until| *until > Instant::now());
        let (Some(until), Some(term)) = (until, self.election.term_number()) else {
            return Err(NotPermitted::Lapsed);
        };
        Ok(Permission { term, until })
    }
}

/// Whether the holder has renewed the Lease since it took it: then it may have written while it could not renew the hub's Lease.
fn was_renewed(lease: &Lease) -> bool {
    let Some(LeaseSpec {
        acquire_time,
        renew_time,
        ..
    }) = &lease.spec
    else {
        return true;
    };
    acquire_time != renew_time
}

/// How long ago this process took the Lease, by the wall clock. Zero if the clock was set back.
fn time_since_taken(lease: &Lease) -> Duration {
    let taken = lease.spec.as_ref().and_then(|spec| spec.acquire_time.as_ref());
    let since = taken.map(|taken| Timestamp::now().duration_since(taken.0));
    since
        .and_then(|since| Duration::try_from(since).ok())
        .unwrap_or_default()
}
