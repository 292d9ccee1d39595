-- What: an event about suspicious operations of a run queues an alert, as one about an attempt to escape does.
-- Why:  a webhook gets both in the same way.
-- Lock: SHARE ROW EXCLUSIVE on events for a moment, for the trigger.

CREATE TRIGGER alert_of_operations AFTER INSERT ON events FOR EACH ROW WHEN (NEW.kind = 'SUSPICIOUS_OPERATIONS')
    EXECUTE FUNCTION respond_to_escape();
