//! Runs tests in a virtual machine whose kernel has WireGuard. The first test boots it and runs this test program
//! inside with the same arguments. Each test then reports its result from there.

use std::{env, sync::OnceLock, time::Duration};

use clustermesh_lab::{Ended, Machine};

/// Environment variable that is set inside the virtual machine.
const IN_MACHINE: &str = "CLUSTERMESH_TEST_MACHINE";
/// Several times the duration of all tests, also on a busy machine.
const LIMIT: Duration = Duration::from_secs(1800);

/// The first statement of a test whose body runs in the virtual machine.
macro_rules! in_the_machine {
    () => {
        fn here() {}
        if crate::virtual_machine::passed_in_machine(std::any::type_name_of_val(&here)) {
            return;
        }
    };
}
pub(crate) use in_the_machine;

/// True when the test passed in the virtual machine; false inside of it. `here` is the path of an item in the test.
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
    let words = env::args()
        .skip(1)
        .filter(|word| word != "--nocapture" && word != "--show-output");
    let command = ["env".to_owned(), format!("{IN_MACHINE}=1"), own.display().to_string()];
    let command: Vec<String> = command.into_iter().chain(words).collect();
    let machine = Machine {
        limit: LIMIT,
        ..Machine::default()
    };
    match machine.run_and_hear(&command).map_err(|error| error.to_string())? {
        (Ended::Code(_), output) => Ok(output),
        (Ended::TimeLimit, _) => Err(format!("not done in {} s", LIMIT.as_secs())),
    }
}
