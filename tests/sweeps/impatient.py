"""`python -m sweeps` that looks more often than it does for a user, so that tests wait less."""

if __name__ == "__main__":  # its workers import this file, too, and none of what follows
    from sweeps import __main__, driver

    driver.LOOK_SECONDS = 0.05
    __main__.main()
