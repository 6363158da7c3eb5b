package replay

var SleepUntil = sleepUntil // for tests
