//! One supervised session per member: its credentials, its client, the feeds that follow its API server, a probe that
//! notices when it falls silent. What one member does never delays another; nothing is planned or written here.

use std::{
    collections::BTreeSet,
    hash::{DefaultHasher, Hash, Hasher},
    sync::{Arc, Mutex, MutexGuard, PoisonError},
    time::{Duration, Instant},
};

use clustermesh_access::memory::Account;
use clustermesh_core::{
    mesh::{ClusterIdentity, ObjectName},
    observe::{Member, Observation},
};
use kube::Client;
use tokio::{sync::watch, task::JoinSet};
use tokio_util::sync::{CancellationToken, DropGuard};

use crate::{
    feed::{Changed, Trust},
    hub::Hub,
    session::tables::Tables,
    trouble,
};

mod checkins;
mod credentials;
mod serve;
pub(crate) mod tables;

pub(crate) use credentials::Credentials;

/// For so long a trouble may last before it is reported: a session that has just begun has asked and not been answered, and
/// an API server that rolls is back in a moment.
const GRACE: Duration = Duration::from_secs(6);

/// Members that connect again together do it within so many milliseconds.
const SPREAD: u64 = 5_000;

/// What of a member beyond Nodes and Peers has to be read.
#[derive(Debug, Clone, Default, PartialEq, Eq)]
pub(crate) struct Interest {
    /// Services that a grant names, at either end.
    pub(crate) services: BTreeSet<ObjectName>,
    /// Namespaces whose pods some export may select.
    pub(crate) pods: BTreeSet<String>,
}

impl Interest {
    fn service_namespaces(&self) -> BTreeSet<String> {
        self.services.iter().map(|name| name.namespace.clone()).collect()
    }
}

/// The connection, as far as others read it.
#[derive(Clone)]
struct Link {
    /// `None` = there are no usable credentials.
    client: Option<Client>,
    /// Why there are none.
    missing: Option<String>,
    /// The probe's last verdict; `None` = it answers, or was not asked yet.
    silent: Option<String>,
    /// `metadata.uid` of kube-system.
    uid: Option<String>,
    /// `gitVersion`.
    version: Option<String>,
    /// Since when it is not fresh; `None` = it is.
    troubled: Option<Instant>,
}

/// A session as the reconcile loop sees it. Dropping it ends the session.
pub(crate) struct Session {
    shared: Arc<Shared>,
    interest: watch::Sender<Interest>,
    cleaning_up: watch::Sender<bool>,
    _end: DropGuard,
}

struct Shared {
    identity: ClusterIdentity,
    /// What is held of it in memory.
    account: Account,
    tables: Tables,
    link: Mutex<Link>,
    changed: Changed,
}

impl Shared {
    /// `charged` = what the tables hold counts against the account.
    fn new(identity: ClusterIdentity, account: Account, charged: bool, changed: Changed) -> Self {
        Self {
            tables: Tables::new(identity.to_string(), charged.then_some(&account), &changed),
            account,
            identity,
            link: Mutex::new(Link {
                client: None,
                missing: None,
                silent: None,
                uid: None,
                version: None,
                troubled: Some(Instant::now()),
            }),
            changed,
        }
    }

    fn link(&self) -> MutexGuard<'_, Link> {
        self.link.lock().unwrap_or_else(PoisonError::into_inner)
    }

    /// Changes the link; wakes the loop.
    fn relink(&self, change: impl FnOnce(&mut Link)) {
        change(&mut self.link());
        self.changed.notify_one();
    }
}

impl Session {
    /// Begins a session; it asks for the credentials first.
    pub(crate) fn begin(identity: ClusterIdentity, hub: Arc<Hub>, changed: Changed) -> Self {
        let end = CancellationToken::new();
        let (interest, wanted) = watch::channel(Interest::default());
        let (cleaning_up, cleans_up) = watch::channel(false);
        let account = hub.memory.account(&identity.to_string());
        // The hub is trusted.
        let charged = identity != ClusterIdentity::Local;
        let shared = Arc::new(Shared::new(identity, account, charged, changed));
        tokio::spawn(supervise(Arc::clone(&shared), hub, wanted, cleans_up, end.clone()));
        Self {
            shared,
            interest,
            cleaning_up,
            _end: end.drop_guard(),
        }
    }

    /// Says what has to be read.
    pub(crate) fn want(&self, interest: &Interest) {
        self.interest.send_if_modified(|current| {
            let news = current != interest;
            if news {
                self.shared.tables.want(interest);
                current.clone_from(interest);
            }
            news
        });
    }

    /// Says whether objects are only removed there. Then the last credentials that could be used still are, where the Secret is
    /// gone: a namespace that is deleted loses its Secrets first, and whoever removes an entry removes its Secret, too.
    pub(crate) fn clean_up(&self, only: bool) {
        self.cleaning_up
            .send_if_modified(|current| std::mem::replace(current, only) != only);
    }

    /// What is seen of the member now.
    pub(crate) fn observe(&self) -> Observation<Member> {
        let mut link = self.shared.link();
        if let Some(why) = &link.missing {
            return Observation::Missing(why.clone());
        }
        let trouble = link.silent.clone().or_else(|| self.shared.tables.trouble());
        link.troubled = trouble.as_ref().map(|_| link.troubled.unwrap_or_else(Instant::now));
        let uid = link.uid.clone();
        drop(link);
        if !self.shared.tables.listed() {
            return Observation::Unreachable(
                trouble.unwrap_or_else(|| "it is being read for the first time".to_owned()),
            );
        }
        let mut member = self.shared.tables.member(uid, &self.interest.borrow());
        self.shared.tables.mark_silent(&mut member, trouble.is_none());
        match trouble {
            None => Observation::Fresh(member),
            Some(why) => Observation::Stale(member, why),
        }
    }

    /// When kg is next found to have stopped checking in for a node, if nothing arrives.
    pub(crate) fn silence_due(&self) -> Option<Instant> {
        self.shared.tables.silence_due()
    }

    /// Whether it is in trouble for so short a time that this says nothing yet.
    pub(crate) fn settling(&self) -> bool {
        let link = self.shared.link();
        link.missing.is_none() && link.troubled.is_some_and(|since| since.elapsed() < GRACE)
    }

    /// The client for writes; `None` without credentials.
    pub(crate) fn client(&self) -> Option<Client> {
        self.shared.link().client.clone()
    }

    /// Whether the probe gets no answer: a write would not either.
    pub(crate) fn silent(&self) -> bool {
        self.shared.link().silent.is_some()
    }

    /// `gitVersion` of its API server, where it said so.
    pub(crate) fn version(&self) -> Option<String> {
        self.shared.link().version.clone()
    }

    /// The tables, for conditional deletes and for the answers to our own writes.
    pub(crate) fn tables(&self) -> Tables {
        self.shared.tables.clone()
    }

    /// For `/debug/state`.
    pub(crate) fn dump(&self) -> serde_json::Value {
        let link = self.shared.link().clone();
        serde_json::json!({
            "credentials": link.missing.unwrap_or_else(|| if link.client.is_some() { "in use" } else { "being read" }.to_owned()),
            "silent": link.silent,
            "uid": link.uid,
            "version": link.version,
            "tables": self.shared.tables.dump(),
        })
    }
}

/// Runs until the session is dropped: whatever ends inside, credentials that changed included, begins again.
async fn supervise(
    shared: Arc<Shared>,
    hub: Arc<Hub>,
    wanted: watch::Receiver<Interest>,
    mut cleaning_up: watch::Receiver<bool>,
    end: CancellationToken,
) {
    let mut watches = JoinSet::new();
    let mut credentials = credentials::follow(&shared.identity, &hub, &shared.account, &mut watches);
    let work = async {
        let (mut was_missing, mut last) = (false, None);
        loop {
            let current = credentials.borrow_and_update().clone();
            let missing = matches!(current, Credentials::Missing(_));
            let current = match current {
                Credentials::Missing(why) if *cleaning_up.borrow_and_update() => {
                    last.clone().map_or(Credentials::Missing(why), Credentials::Ready)
                }
                current => current,
            };
            if let Credentials::Ready(client) = &current {
                last = Some(client.clone());
            }
            let late = std::mem::replace(&mut was_missing, missing) && !missing;
            let served = async {
                match &current {
                    Credentials::Pending => std::future::pending().await,
                    Credentials::Missing(why) => {
                        shared.relink(|link| {
                            link.client = None;
                            link.missing = Some(why.clone());
                        });
                        std::future::pending().await
                    }
                    Credentials::Ready(client) => {
                        if late {
                            tokio::time::sleep(spread(&shared.identity)).await;
                        }
                        serve::serve(&shared, client, wanted.clone()).await;
                    }
                }
            };
            tokio::select! {
                () = served => {}
                Ok(()) = cleaning_up.changed(), if missing => {}
                changed = credentials.changed() => if changed.is_err() {
                    // The task that follows the Secret died; without it a rotation would go unnoticed.
                    tracing::error!(member = %shared.identity, "the watch of the kubeconfig Secret ended; beginning it again");
                    watches = JoinSet::new();
                    credentials = credentials::follow(&shared.identity, &hub, &shared.account, &mut watches);
                },
            }
        }
    };
    tokio::select! {
        () = work => {}
        () = end.cancelled() => {}
    }
}

/// When a member that lost its credentials connects again: members that lost them together must not list together. Always the
/// same for one member.
fn spread(identity: &ClusterIdentity) -> Duration {
    let mut hasher = DefaultHasher::new();
    identity.to_string().hash(&mut hasher);
    Duration::from_millis(hasher.finish() % SPREAD)
}

/// What the feeds say of a member whose required tables are these; the first trouble, in words.
fn first_trouble(trusts: impl IntoIterator<Item = Trust>) -> Option<String> {
    trusts.into_iter().find_map(|trust| match trust {
        Trust::Live | Trust::Absent => None,
        Trust::Pending => Some("it is being read for the first time".to_owned()),
        Trust::Broken(why) | Trust::Denied(why) => Some(why),
    })
}

/// For the probe and the kube-system UID.
async fn bounded<T>(request: impl Future<Output = Result<T, kube::Error>>) -> Result<T, Failure> {
    match tokio::time::timeout(Duration::from_secs(5), request).await {
        Ok(answer) => answer.map_err(|error| {
            tracing::debug!(error = %trouble::quoted(&error.to_string()), "request failed");
            Failure {
                answered: trouble::answered(&error),
                why: trouble::words(&error),
            }
        }),
        Err(_) => Err(Failure {
            answered: false,
            why: trouble::SILENT.to_owned(),
        }),
    }
}

/// A request that failed.
#[derive(Debug)]
struct Failure {
    /// There is an API server that answered it.
    answered: bool,
    why: String,
}

#[cfg(test)]
mod tests;
