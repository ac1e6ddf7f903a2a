"""`python -m sweeps` that looks more often than it does for a user, so that tests wait less."""

if __name__ == "__main__":  # its workers import this file, too, and none of what follows
    from sweeps import __main__, driver, on_slurm

    driver.LOOK_SECONDS = on_slurm.LOOK_SECONDS = 0.05
    on_slurm.ASK_SECONDS = 0.3
    __main__.main()
