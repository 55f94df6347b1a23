"""Pipeline parallelism: schedules, partition, stages and their runtime."""
