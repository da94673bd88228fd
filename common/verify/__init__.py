"""`luthier verify-resume`: interrupt a run from outside, let it go on, and compare it with an uninterrupted one."""
