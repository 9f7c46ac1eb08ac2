//! Keeps one [`Feed`] true: list, watch, resume, list again. It never ends by itself; whoever spawned it drops it.

use std::{collections::BTreeMap, time::Duration};

use backon::{BackoffBuilder, ExponentialBackoff, ExponentialBuilder};
use clustermesh_access::{bounds::over_budget, memory::OverBudget};
use futures::{StreamExt, TryStreamExt};
use kube::{
    Api, Error,
    api::{DynamicObject, ListParams, WatchEvent, WatchParams},
};
use tokio::{sync::watch, time::Instant};

use super::{Feed, List, Trust, identity};
use crate::trouble;

/// Objects a page at first: of Nodes about 1 MB. A page that is over the budget is asked for again with half as many, down to
/// one, so what a server may send at once bounds no object that it holds.
const PAGE: u32 = 50;
/// More objects of one kind are not taken: a hostile API server could go on for ever, and memory is shared by all members.
const MAX_OBJECTS: usize = 50_000;
/// Nor more pages, however little is in each.
const MAX_PAGES: usize = 4 * MAX_OBJECTS / PAGE as usize;
/// A token that asks for the next page is not longer: it comes back in the URL.
const MAX_TOKEN: usize = 16 * 1024;
/// For a page of a list, and for the start of a watch.
const REQUEST: Duration = Duration::from_secs(30);
/// After this the API server ends a watch itself (seconds), and it is resumed.
const WATCH_SECONDS: u32 = 290;
/// Without an event for this long the connection is dead: the server's own end never came.
const IDLE: Duration = Duration::from_secs(WATCH_SECONDS as u64 + 15);
/// A watch that stood for this long was no failure; only such a one shortens the next pause again.
const STANDING: Duration = Duration::from_secs(20);
/// How often a kind that is not there is asked for again.
const ABSENT: Duration = Duration::from_secs(3);

/// What to follow.
#[derive(Debug, Clone)]
pub(crate) struct Source {
    /// The kind, in one namespace or in all.
    pub(crate) api: Api<DynamicObject>,
    /// What it is called in messages: `nodes`, `secrets in namespace x`.
    pub(crate) what: String,
    /// Whose it is, in logs.
    pub(crate) whose: String,
    /// Label selector, empty = all.
    pub(crate) labels: String,
    /// Field selector, empty = all.
    pub(crate) fields: String,
}

/// Tells feeds that their connections may be dead: each resumes at once from the version it has, without a new list.
pub(crate) type Resume = watch::Receiver<u64>;

/// Keeps `feed` true. Never returns.
pub(crate) async fn follow<V: Clone + PartialEq>(source: &Source, feed: &Feed<V>, resume: Resume) {
    let mut course = Course {
        pause: pauses(),
        expired: 0,
        doubted: false,
        resume,
    };
    loop {
        let listed = tokio::select! {
            listed = list(source, feed) => listed,
            () = resumed(&mut course.resume) => continue,
        };
        let failed = match listed {
            Ok(list) => {
                let version = list.version.clone();
                feed.replace(list, !course.doubted);
                watch(source, feed, version, &mut course).await
            }
            Err(failed) => failed,
        };
        let wait = report(source, feed, &failed, &mut course);
        course.wait(wait).await;
    }
}

/// How following has gone so far.
struct Course {
    pause: ExponentialBackoff,
    /// How often the server has called a version too old since a watch last stood.
    expired: u32,
    /// The server serves lists, and fails each watch: what it lists is not taken for current until a watch stands.
    doubted: bool,
    resume: Resume,
}

impl Course {
    /// A watch stood for a while.
    fn stood(&mut self) {
        self.pause = pauses();
        self.expired = 0;
    }

    /// Waits so long, or for the next pause, or until it is told to resume.
    async fn wait(&mut self, pause: Option<Duration>) {
        let pause = pause.unwrap_or_else(|| self.pause.next().unwrap_or(Duration::from_secs(30)));
        tokio::select! {
            () = tokio::time::sleep(pause) => {}
            () = resumed(&mut self.resume) => {}
        }
    }
}

/// Waits for the signal to resume; forever if its sender is gone.
async fn resumed(resume: &mut Resume) {
    if resume.changed().await.is_err() {
        std::future::pending::<()>().await;
    }
}

/// Half a second, doubling to half a minute, each with jitter; for ever.
fn pauses() -> ExponentialBackoff {
    ExponentialBuilder::new()
        .with_min_delay(Duration::from_millis(500))
        .with_max_delay(Duration::from_secs(30))
        .with_jitter()
        .without_max_times()
        .build()
}

#[derive(Debug)]
enum Failed {
    /// The version to resume from is too old: list again, after a pause too, since a server may say so for ever.
    Expired,
    /// There is more than is taken.
    TooMany,
    /// It takes more memory than it may.
    Over(OverBudget),
    Api(Error),
    TimedOut,
}

impl From<Error> for Failed {
    fn from(error: Error) -> Self {
        match error {
            Error::Api(status) if status.code == 410 => Self::Expired,
            error => over_budget(&error).map_or(Self::Api(error), Self::Over),
        }
    }
}

impl From<OverBudget> for Failed {
    fn from(over: OverBudget) -> Self {
        Self::Over(over)
    }
}

/// Notes the failure in the feed; a fixed pause where there is one.
fn report<V: Clone + PartialEq>(
    source: &Source,
    feed: &Feed<V>,
    failed: &Failed,
    course: &mut Course,
) -> Option<Duration> {
    let what = &source.what;
    let (trust, pause) = match failed {
        // One 410 (expired) is normal. A server that repeats it serves neither a list nor a watch.
        Failed::Expired if course.expired == 0 => {
            course.expired += 1;
            return None;
        }
        Failed::Expired => (
            Trust::Broken(format!("its API server calls every version of {what} too old (410)")),
            None,
        ),
        Failed::TooMany => (
            Trust::Broken(format!(
                "its API server lists more than {MAX_OBJECTS} {what}, or more than {MAX_PAGES} pages of them"
            )),
            None,
        ),
        Failed::Over(over) => (Trust::Broken(format!("{over} ({what})")), None),
        Failed::TimedOut => (Trust::Broken(trouble::SILENT.to_owned()), None),
        Failed::Api(Error::Api(status)) if status.code == 404 => (Trust::Absent, Some(ABSENT)),
        Failed::Api(Error::Api(status)) if status.code == 403 => (
            Trust::Denied(format!("the account may not list and watch {what} (403)")),
            None,
        ),
        Failed::Api(error) => {
            tracing::debug!(what, error = %trouble::quoted(&error.to_string()), "list or watch failed");
            (Trust::Broken(trouble::words(error)), None)
        }
    };
    course.doubted |= matches!(failed, Failed::Expired | Failed::TooMany | Failed::Over(_));
    if feed.set_trust(trust.clone()) {
        tracing::info!(what, whose = source.whose, state = ?trust, "no longer followed; asking again");
    }
    pause
}

/// Lists everything, page by page.
async fn list<V: Clone + PartialEq>(source: &Source, feed: &Feed<V>) -> Result<List<V>, Failed> {
    let mut list = List {
        drafts: Vec::new(),
        version: String::new(),
        charge: feed.charge(),
    };
    let mut params = ListParams::default();
    if !source.labels.is_empty() {
        params = params.labels(&source.labels);
    }
    if !source.fields.is_empty() {
        params = params.fields(&source.fields);
    }
    let mut size = PAGE;
    for _ in 0..MAX_PAGES {
        params.limit = Some(size);
        let asked = tokio::time::timeout(REQUEST, source.api.list(&params)).await;
        let page = match asked.map_err(|_| Failed::TimedOut)?.map_err(Failed::from) {
            Ok(page) => page,
            Err(Failed::Over(_)) if size > 1 => {
                size /= 2;
                continue;
            }
            Err(failed) => return Err(failed),
        };
        for object in page.items {
            let Some(draft) = feed.draft(object) else { continue };
            list.add(draft)?;
        }
        if list.drafts.len() > MAX_OBJECTS {
            return Err(Failed::TooMany);
        }
        match page.metadata.continue_.filter(|token| !token.is_empty()) {
            Some(token) if token.len() > MAX_TOKEN => return Err(Failed::TooMany),
            Some(token) => params.continue_token = Some(token),
            None => {
                list.version = page.metadata.resource_version.unwrap_or_default();
                return Ok(list);
            }
        }
    }
    Err(Failed::TooMany)
}

/// Follows from `version`, resuming where it broke, until a list is needed or a failure has to be waited out.
async fn watch<V: Clone + PartialEq>(
    source: &Source,
    feed: &Feed<V>,
    mut version: String,
    course: &mut Course,
) -> Failed {
    let mut params = WatchParams::default().timeout(WATCH_SECONDS);
    if !source.labels.is_empty() {
        params = params.labels(&source.labels);
    }
    if !source.fields.is_empty() {
        params = params.fields(&source.fields);
    }
    loop {
        let opened = tokio::select! {
            opened = tokio::time::timeout(REQUEST, source.api.watch(&params, &version)) => opened,
            () = resumed(&mut course.resume) => continue,
        };
        let failed = match opened {
            Ok(Ok(stream)) => {
                if !course.doubted {
                    feed.set_trust(Trust::Live);
                }
                let began = Instant::now();
                match events(feed, stream.boxed(), &mut version, course).await {
                    Ok(End::Closed) => {
                        // A server may refuse by closing, with or without an event first: wait, do not spin.
                        if began.elapsed() <= STANDING {
                            course.wait(None).await;
                        }
                        continue;
                    }
                    Ok(End::Resume) => continue,
                    Err(failed) => failed,
                }
            }
            Ok(Err(error)) => error.into(),
            Err(_) => Failed::TimedOut,
        };
        // Without the connection the last version is still good; anything the server said asks for a new list.
        if !matches!(
            failed,
            Failed::TimedOut | Failed::Api(Error::HyperError(_) | Error::Service(_) | Error::ReadEvents(_))
        ) {
            return failed;
        }
        report(source, feed, &failed, course);
        course.wait(None).await;
    }
}

/// Why a watch ended that did not fail.
enum End {
    /// The server closed it.
    Closed,
    /// The connection may be dead.
    Resume,
}

/// Takes events until the stream ends or fails.
async fn events<V: Clone + PartialEq>(
    feed: &Feed<V>,
    mut stream: futures::stream::BoxStream<'_, Result<WatchEvent<DynamicObject>, Error>>,
    version: &mut String,
    course: &mut Course,
) -> Result<End, Failed> {
    let (began, mut stood) = (Instant::now(), false);
    loop {
        let standing = tokio::time::sleep_until(began + STANDING);
        let next = tokio::select! {
            next = tokio::time::timeout(IDLE, stream.try_next()) => next,
            () = standing, if !stood => {
                stood = true;
                if std::mem::take(&mut course.doubted) {
                    feed.set_trust(Trust::Live);
                }
                course.stood();
                continue;
            }
            () = resumed(&mut course.resume) => return Ok(End::Resume),
        };
        let event = match next {
            Err(_) => return Err(Failed::TimedOut),
            Ok(event) => event?,
        };
        match event {
            None => return Ok(End::Closed),
            Some(WatchEvent::Added(object) | WatchEvent::Modified(object)) => {
                *version = object.metadata.resource_version.clone().unwrap_or_default();
                feed.put(object)?;
                if feed.read(BTreeMap::len) > MAX_OBJECTS {
                    return Err(Failed::TooMany);
                }
            }
            Some(WatchEvent::Deleted(object)) => {
                *version = object.metadata.resource_version.clone().unwrap_or_default();
                if let Some((name, ..)) = identity(&object.metadata) {
                    feed.remove(&name);
                }
            }
            Some(WatchEvent::Bookmark(mark)) => *version = mark.metadata.resource_version,
            Some(WatchEvent::Error(status)) => return Err(Error::Api(status).into()),
        }
    }
}

#[cfg(test)]
mod tests;
