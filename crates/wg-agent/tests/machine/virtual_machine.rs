//! Runs tests in a virtual machine whose kernel has WireGuard. The first test boots the machine and runs this test program
//! in it with the same arguments, except those that print the output of passed tests. Each test then reports its result
//! from the output of that run.

use std::{env, sync::OnceLock, time::Duration};

use clustermesh_lab::{CommandEnd, Machine};

/// Environment variable that is set inside the virtual machine.
const IN_MACHINE: &str = "CLUSTERMESH_TEST_MACHINE";
/// The time limit of the run. It is several times the duration of all tests on a busy machine.
const LIMIT: Duration = Duration::from_secs(3600);

/// Must be the first statement of a test. Outside the virtual machine, the test ends here with its result from inside.
macro_rules! run_in_machine {
    () => {
        fn here() {}
        if crate::virtual_machine::passed_in_machine(std::any::type_name_of_val(&here)) {
            return;
        }
    };
}
pub(crate) use run_in_machine;

/// Inside the virtual machine, returns false, so that the test runs. Outside, returns true if the test passed inside, and
/// panics if it failed or if the machine did not finish. `here` is the path of an item in the test.
pub(crate) fn passed_in_machine(here: &str) -> bool {
    static OUTPUT: OnceLock<Result<String, String>> = OnceLock::new();
    if env::var_os(IN_MACHINE).is_some() {
        return false;
    }
    let test = here.split("::").skip(1).collect::<Vec<_>>();
    let test = test.split_last().expect("a test's path").1.join("::");
    match OUTPUT.get_or_init(run) {
        Ok(output) if output.contains(&format!("test {test} ... ok\n")) => true,
        Ok(_) => panic!("{test} failed in the virtual machine; see its output above"),
        Err(error) => panic!("no virtual machine: {error}"),
    }
}

/// Runs this program in the virtual machine and returns its output.
fn run() -> Result<String, String> {
    let own = env::current_exe().map_err(|error| error.to_string())?;
    // Drops the flags that print the output of passed tests: this output could split the line `test NAME ... ok`.
    let words = env::args()
        .skip(1)
        .filter(|word| word != "--nocapture" && word != "--show-output");
    let command = ["env".to_owned(), format!("{IN_MACHINE}=1"), own.display().to_string()];
    let command: Vec<String> = command.into_iter().chain(words).collect();
    let machine = Machine {
        limit: LIMIT,
        ..Machine::default()
    };
    match machine.run_with_output(&command).map_err(|error| error.to_string())? {
        (CommandEnd::Code(_), output) => Ok(output),
        (CommandEnd::TimeLimit, _) => Err(format!("not finished after {} s", LIMIT.as_secs())),
    }
}
