//! Limits how much of this process's memory the data of members may use: one [`Memory`] for all members, one [`Account`] for
//! each member, and one [`Charge`] for each response, each list and each object table of a member.

use std::{
    fmt,
    sync::{
        Arc, Mutex, MutexGuard, PoisonError,
        atomic::{AtomicUsize, Ordering},
    },
};

const MIB: usize = 1024 * 1024;

/// The data of a member exceeds a limit. The messages are shown in the status of a mesh.
#[derive(Debug, Clone, Copy, PartialEq, Eq, thiserror::Error)]
pub enum OverBudget {
    /// One response is too long.
    #[error("over its budget: its API server answers with more than {} MiB at once", .0 / MIB)]
    Response(usize),
    /// One line of a watch is too long.
    #[error("over its budget: its API server sends a watch event of more than {} MiB", .0 / MIB)]
    Event(usize),
    /// One response or event has so many JSON values that parsing it would take too much memory.
    #[error("over its budget: its API server sends JSON that takes more than {} MiB to parse", .0 / MIB)]
    Values(usize),
    /// The data of the member exceeds the limit for one member.
    #[error("over its budget: its objects take more than {} MiB of the controller's memory", .0 / MIB)]
    Member(usize),
    /// The data of all members exceeds the limit, and the data of this member exceeds an equal share.
    #[error("over its budget: its objects take more than an equal share of the {} MiB that the controller has for all members", .0 / MIB)]
    Share(usize),
}

impl OverBudget {
    /// The value of a metric's label.
    #[must_use]
    pub const fn label(&self) -> &'static str {
        match self {
            Self::Response(_) => "answer",
            Self::Event(_) => "event",
            Self::Values(_) => "values",
            Self::Member(_) => "member",
            Self::Share(_) => "share",
        }
    }
}

/// A callback that gets the name of the member and the exceeded limit at each refusal.
type Report = dyn Fn(&str, OverBudget) + Send + Sync;

/// The memory that all members share. Cheap to clone; all clones share one value.
///
/// A member may take half of the limit. When the members together have taken the limit, each may grow only up to an equal share of
/// it, so members with much data cannot keep the others from being read. With a constant number of members, the sum stays below
/// twice the limit.
#[derive(Clone)]
pub struct Memory {
    ledger: Arc<Mutex<Ledger>>,
    limit: usize,
    report: Arc<Report>,
}

#[derive(Debug, Default)]
struct Ledger {
    used: usize,
    accounts: usize,
}

impl fmt::Debug for Memory {
    fn fmt(&self, f: &mut fmt::Formatter<'_>) -> fmt::Result {
        f.debug_struct("Memory").field("ledger", &*self.lock()).finish()
    }
}

impl Memory {
    /// Creates a budget of `limit` bytes. `report` is called at each refusal.
    pub fn new(limit: usize, report: impl Fn(&str, OverBudget) + Send + Sync + 'static) -> Self {
        Self {
            ledger: Arc::default(),
            limit,
            report: Arc::new(report),
        }
    }

    /// Creates the account of one member. `name` identifies the member in calls of `report`.
    #[must_use]
    pub fn account(&self, name: &str) -> Account {
        self.lock().accounts += 1;
        Account(Arc::new(AccountState {
            name: name.to_owned(),
            memory: self.clone(),
            used: AtomicUsize::new(0),
        }))
    }

    fn lock(&self) -> MutexGuard<'_, Ledger> {
        self.ledger.lock().unwrap_or_else(PoisonError::into_inner)
    }
}

/// The account of one member. Cheap to clone; all clones share one value.
#[derive(Debug, Clone)]
pub struct Account(Arc<AccountState>);

#[derive(Debug)]
struct AccountState {
    name: String,
    memory: Memory,
    /// Changes only under the lock of the ledger.
    used: AtomicUsize,
}

impl Drop for AccountState {
    fn drop(&mut self) {
        self.memory.lock().accounts -= 1;
    }
}

impl Account {
    /// Creates an account that shares no [`Memory`] with others and has a limit of `limit` bytes, for a process that reads a few
    /// clusters once.
    #[must_use]
    pub fn standalone(limit: usize) -> Self {
        Memory::new(2 * limit, |_, _| {}).account("")
    }

    /// Creates a charge of zero bytes.
    #[must_use]
    pub fn charge(&self) -> Charge {
        Charge {
            account: self.clone(),
            bytes: 0,
        }
    }

    /// The number of bytes that are charged to the account.
    #[must_use]
    pub fn used(&self) -> usize {
        self.0.used.load(Ordering::Relaxed)
    }

    /// Reports a refusal and returns it.
    pub(crate) fn refuse(&self, over: OverBudget) -> OverBudget {
        (self.0.memory.report)(&self.0.name, over);
        over
    }
}

/// Bytes that are charged to a member's account until the value is dropped.
#[derive(Debug)]
pub struct Charge {
    account: Account,
    bytes: usize,
}

impl Charge {
    /// Changes the charge to `bytes`. A reduction always succeeds.
    ///
    /// # Errors
    /// The member, or all members together, would exceed a limit. Then the charge is unchanged.
    pub fn set(&mut self, bytes: usize) -> Result<(), OverBudget> {
        let state = &*self.account.0;
        let memory = &state.memory;
        let mut ledger = memory.lock();
        let own = state.used.load(Ordering::Relaxed) - self.bytes + bytes;
        let all = ledger.used - self.bytes + bytes;
        let over = if bytes <= self.bytes {
            None
        } else if own > memory.limit / 2 {
            Some(OverBudget::Member(memory.limit / 2))
        } else {
            (all > memory.limit && own > memory.limit / ledger.accounts.max(1))
                .then_some(OverBudget::Share(memory.limit))
        };
        if let Some(over) = over {
            drop(ledger);
            return Err(self.account.refuse(over));
        }
        ledger.used = all;
        state.used.store(own, Ordering::Relaxed);
        drop(ledger);
        self.bytes = bytes;
        Ok(())
    }

    /// Creates a charge of zero bytes on the same account.
    #[must_use]
    pub fn another(&self) -> Self {
        self.account.charge()
    }

    /// The number of charged bytes.
    #[must_use]
    pub const fn bytes(&self) -> usize {
        self.bytes
    }

    pub(crate) const fn account(&self) -> &Account {
        &self.account
    }
}

impl Drop for Charge {
    fn drop(&mut self) {
        // A reduction always succeeds.
        let _ = self.set(0);
    }
}

#[cfg(test)]
mod tests {
    use super::*;

    // threat: endless-answer
    #[test]
    fn member_takes_half_and_only_its_share_of_a_full_memory() {
        let memory = Memory::new(100, |_, _| {});
        let accounts: Vec<Account> = (0..5).map(|n| memory.account(&n.to_string())).collect();
        let mut charges: Vec<Charge> = accounts.iter().map(Account::charge).collect();
        assert_eq!(charges[0].set(51), Err(OverBudget::Member(50)));
        assert_eq!((charges[0].set(50), charges[1].set(50)), (Ok(()), Ok(())));
        // The memory is full, so each of the five accounts may grow only to an equal share.
        assert_eq!(charges[2].set(21), Err(OverBudget::Share(100)));
        for charge in &mut charges[2..] {
            assert_eq!(charge.set(20), Ok(()));
        }
        assert_eq!((memory.lock().used, charges[2].bytes()), (160, 20));
        // Released memory can be charged again.
        assert_eq!(charges[0].set(10), Ok(()));
        charges.remove(1);
        assert_eq!(charges[1].set(25), Ok(()));
        drop(charges);
        drop(accounts);
        let ledger = memory.lock();
        assert_eq!((ledger.used, ledger.accounts), (0, 0));
    }

    #[test]
    fn refusal_is_reported_with_the_name_of_the_member() {
        let reports = Arc::new(Mutex::new(Vec::new()));
        let kept = Arc::clone(&reports);
        let memory = Memory::new(8, move |name, over| {
            kept.lock().unwrap().push((name.to_owned(), over.label()));
        });
        let mut charge = memory.account("tenant-a").charge();
        assert!(charge.set(5).is_err());
        assert_eq!(*reports.lock().unwrap(), [("tenant-a".to_owned(), "member")]);
    }
}
