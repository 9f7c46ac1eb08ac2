//! A feed of a member together with what it follows, ready to be run by a connection.

use futures::future::BoxFuture;

use super::Asked;
use crate::feed::{Feed, Resume, Source, follow};

/// One feed and what it follows.
pub(in crate::session) struct Following {
    /// Tells the feed from others of the same objects.
    pub(in crate::session) table: u64,
    follow: Box<dyn FnOnce(Resume) -> BoxFuture<'static, ()> + Send>,
}

impl Following {
    pub(super) fn new<V: Clone + PartialEq + Send + 'static>(source: Source, feed: &Feed<V>) -> Self {
        let feed = feed.clone();
        Self {
            table: 0,
            follow: Box::new(move |resume| Box::pin(async move { follow(&source, &feed, resume).await })),
        }
    }

    pub(super) fn asked<V: Clone + PartialEq + Send + 'static>(source: Source, asked: &Asked<V>) -> Self {
        Self {
            table: asked.table,
            ..Self::new(source, &asked.feed)
        }
    }

    /// Follows; never returns.
    pub(in crate::session) fn run(self, resume: Resume) -> BoxFuture<'static, ()> {
        (self.follow)(resume)
    }
}
