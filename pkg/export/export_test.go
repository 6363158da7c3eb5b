package export

var SleepUntil = sleepUntil // for tests
