//! Raises the limit on open files.

use rustix::process::{Resource, Rlimit, getrlimit, setrlimit};

/// Raises the soft limit on open files (RLIMIT_NOFILE, often 1,024) to the hard limit. The soft limit is low because of programs that
/// use select(2); neither this process nor its children call select. If the limit cannot be raised, the program logs that and continues.
pub fn raise_limit() {
    let Rlimit { current, maximum } = getrlimit(Resource::Nofile);
    let raised = Rlimit {
        current: maximum,
        maximum,
    };
    if current != maximum
        && let Err(error) = setrlimit(Resource::Nofile, raised)
    {
        tracing::warn!(%error, ?current, ?maximum, "cannot raise the limit on open files");
    }
}

#[cfg(test)]
mod tests {
    use super::*;

    #[test]
    fn soft_limit_is_raised_to_the_hard_limit() {
        let Rlimit { maximum, .. } = getrlimit(Resource::Nofile);
        let low = Rlimit {
            current: Some(512),
            maximum,
        };
        setrlimit(Resource::Nofile, low).unwrap();
        assert_eq!(getrlimit(Resource::Nofile), low);
        raise_limit();
        assert_eq!(getrlimit(Resource::Nofile).current, maximum);
    }
}
