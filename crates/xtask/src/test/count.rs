//! Counts tests from the output of test programs. A run fails if a test fails or is ignored, or if too few tests ran.

use std::{fmt, iter::Sum};

/// The minimum number of tests that `cargo xtask test` must run if no tests are selected. Raise it when you add tests; lower it only when
/// you delete tests.
const MIN_TESTS: u64 = 1000;

/// The counts of one program, or their sum.
#[derive(Debug, Clone, Copy, Default, PartialEq, Eq)]
pub(super) struct Counts {
    passed: u64,
    failed: u64,
    ignored: u64,
}

impl Counts {
    /// The counts of a program that printed no result, because it was killed or called `exit`.
    const LOST: Self = Self {
        passed: 0,
        failed: 1,
        ignored: 0,
    };

    /// Parses the output of one test program. Only the last result line counts: a program that runs itself in a virtual
    /// machine first prints the results of that run.
    pub(super) fn of_program(output: &str) -> Self {
        output.lines().rev().find_map(Self::of_line).unwrap_or(Self::LOST)
    }

    /// Parses the output of `cargo test`, with both streams in one: a heading for each program, then the output of the program.
    pub(super) fn of_cargo(output: &str) -> Self {
        let mut programs: Vec<Option<Self>> = Vec::new();
        for line in output.lines() {
            if is_heading(line) {
                programs.push(None);
            } else if let (Some(last), Some(counts)) = (programs.last_mut(), Self::of_line(line)) {
                *last = Some(counts);
            }
        }
        programs.into_iter().map(|counts| counts.unwrap_or(Self::LOST)).sum()
    }

    /// Adds a failure if the program failed without a failed test: it may fail after its last test.
    pub(super) const fn with_exit(mut self, success: bool) -> Self {
        if !success && self.failed == 0 {
            self.failed = 1;
        }
        self
    }

    /// Parses a result line: `test result: ok. 3 passed; 0 failed; 0 ignored; 0 measured; 9 filtered out; finished in 0.01s`
    fn of_line(line: &str) -> Option<Self> {
        let (_, counts) = line.strip_prefix("test result: ")?.split_once(". ")?;
        let count = |what: &str| {
            let mut parts = counts.split("; ");
            parts.find_map(|part| part.strip_suffix(what)?.trim_end().parse().ok())
        };
        Some(Self {
            passed: count("passed")?,
            failed: count("failed")?,
            ignored: count("ignored")?,
        })
    }

    /// Returns problems other than failed tests: ignored tests, or fewer tests than expected. Adds the ignored and missing tests to
    /// `failed`, so that the last line agrees with the exit code.
    pub(super) fn check_completeness(&mut self, scope: Scope) -> Vec<String> {
        let mut problems = Vec::new();
        if self.ignored > 0 {
            problems.push(format!(
                "{} tests are ignored: make them run, or delete them",
                self.ignored
            ));
        }
        let ran = self.passed + self.failed;
        let missing = scope.least().saturating_sub(ran);
        if missing > 0 {
            problems.push(match scope {
                Scope::All { least } => format!(
                    "{ran} tests ran, {missing} fewer than MIN_TESTS ({least}) in crates/xtask/src/test/count.rs: find the program or \
                     module that is not built any more. MIN_TESTS is raised when tests are added, and lowered only when tests are deleted"
                ),
                Scope::Selected => "no test matches: a name is a part of a test's path, as `cargo test -p PACKAGE -- --list` \
                                    prints it"
                    .to_owned(),
            });
        }
        self.failed += self.ignored + missing;
        problems
    }

    pub(super) const fn is_success(&self) -> bool {
        self.failed == 0
    }
}

/// `     Running unittests src/lib.rs (target/debug/deps/x-0123)`, `   Doc-tests x`.
fn is_heading(line: &str) -> bool {
    let line = line.trim_start();
    (line.starts_with("Running ") && line.contains(" (") && line.ends_with(')')) || line.starts_with("Doc-tests ")
}

/// The tests of a run.
#[derive(Debug, Clone, Copy)]
pub(super) enum Scope {
    /// All tests of the project.
    All { least: u64 },
    /// The tests that the arguments select.
    Selected,
}

impl Scope {
    pub(super) const ALL: Self = Self::All { least: MIN_TESTS };

    const fn least(self) -> u64 {
        match self {
            Self::All { least } => least,
            Self::Selected => 1,
        }
    }
}

impl Sum for Counts {
    fn sum<I: Iterator<Item = Self>>(counts: I) -> Self {
        counts.fold(Self::default(), |sum, one| Self {
            passed: sum.passed + one.passed,
            failed: sum.failed + one.failed,
            ignored: sum.ignored + one.ignored,
        })
    }
}

/// The last line of a run.
impl fmt::Display for Counts {
    fn fmt(&self, f: &mut fmt::Formatter<'_>) -> fmt::Result {
        write!(f, "{} passed, {} failed", self.passed, self.failed)
    }
}

#[cfg(test)]
mod tests {
    use super::*;

    const fn counts(passed: u64, failed: u64, ignored: u64) -> Counts {
        Counts {
            passed,
            failed,
            ignored,
        }
    }

    const INNER: &str =
        "test result: FAILED. 1 passed; 4 failed; 0 ignored; 0 measured; 0 filtered out; finished in 2.10s";
    const OUTER: &str = "test result: ok. 5 passed; 0 failed; 2 ignored; 0 measured; 7 filtered out; finished in 9.00s";

    #[test]
    fn only_last_result_of_a_program_counts() {
        let output = format!("\nrunning 5 tests\ntest a ... \nrunning 5 tests\n{INNER}\nok\n\n{OUTER}\n\n");
        assert_eq!(Counts::of_program(&output), counts(5, 0, 2));
        assert_eq!(Counts::of_program("\nrunning 5 tests\ntest a ... "), counts(0, 1, 0));
    }

    #[test]
    fn cargo_output_counts_one_result_for_each_program() {
        let output = format!(
            "   Compiling x v0.1.0 (/x)\n     Running unittests src/lib.rs (target/debug/deps/x-01)\n\nrunning 5 tests\n{INNER}\n\
             {OUTER}\n     Running tests/lost.rs (target/debug/deps/lost-02)\n\nrunning 1 test\n   Doc-tests x\n{OUTER}\n"
        );
        assert_eq!(Counts::of_cargo(&output), counts(10, 1, 4));
        assert_eq!(Counts::of_cargo(OUTER), counts(0, 0, 0));
    }

    #[test]
    fn run_below_its_minimum_or_with_ignored_tests_fails() {
        let judged = |mut counts: Counts, scope| (counts.check_completeness(scope).len(), counts.to_string());
        let all = Scope::All { least: 3 };
        assert_eq!(judged(counts(3, 0, 0), all), (0, "3 passed, 0 failed".to_owned()));
        assert_eq!(judged(counts(2, 1, 0), all), (0, "2 passed, 1 failed".to_owned()));
        assert_eq!(judged(counts(2, 0, 0), all), (1, "2 passed, 1 failed".to_owned()));
        assert_eq!(judged(counts(0, 0, 0), all), (1, "0 passed, 3 failed".to_owned()));
        assert_eq!(judged(counts(3, 0, 1), all), (1, "3 passed, 1 failed".to_owned()));
        assert_eq!(
            judged(counts(1, 0, 0), Scope::Selected),
            (0, "1 passed, 0 failed".to_owned())
        );
        assert_eq!(
            judged(counts(0, 0, 0), Scope::Selected),
            (1, "0 passed, 1 failed".to_owned())
        );
    }
}
